"""QeRLTrainer: TRL's GRPOTrainer over frozen 4-bit weights and our rollout engine.

A thin subclass. Losses, advantages, masks, tools, logging, checkpointing and resume are TRL's; the seams are

* ``vllm_generation``: :class:`~qerl.trainer.bridge.RolloutBridge` stands in for it, which switches on TRL's
  importance-sampling correction with the engine's log-probs;
* ``_get_per_token_logps_and_entropies``: overridden to run packed, without padding;
* ``_get_train_sampler``: the same prompt order, as a function of seed and epoch.

Wrapped, with TRL's method doing the work: ``_generate_and_score_completions`` (importance weights in the metrics, zero
advantages for equal rewards), ``_calculate_rewards`` (infinite rewards refused), ``_prepare_inputs`` (whole groups in
micro-batches), ``compute_loss`` (a loss that is not finite stops the run), ``train`` and ``evaluate`` (clean policy).
"""

import logging
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from trl import GRPOTrainer

from qerl.nn.attention import PACKED_ATTENTION
from qerl.nn.head import install_scoring_head
from qerl.nn.norm import aqn_norms
from qerl.nn.surgery import packed_parameters
from qerl.rl.aqn import NoiseInjector
from qerl.rollout.build import make_engine
from qerl.rollout.engine import RolloutEngine
from qerl.trainer.bridge import RolloutBridge
from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.dynamic import PreparedBatch, make_dynamic_sampling
from qerl.trainer.logprobs import packed_logprobs
from qerl.trainer.parity import effective_sample_size
from qerl.trainer.policy import adapter_config, causal_model, load_policy
from qerl.trainer.preflight import (
    check_prompts,
    format_memory_table,
    kv_cache_bytes,
    longest_eval_prompt,
    memory_table,
    try_worst_case,
    warn_of_skipped_stages,
)
from qerl.trainer.regroup import regroup
from qerl.trainer.reward_arguments import check_reward_arguments
from qerl.trainer.reward_trial import try_rewards
from qerl.trainer.sampler import EpochRepeatSampler
from qerl.trainer.timed_reward import TimedReward, timed

logger = logging.getLogger(__name__)


class CollapsedSamplingError(RuntimeError):
    """The importance weights say that the batch tells little about the trained policy."""


class RewardValueError(ValueError):
    """A reward that cannot be used."""


class NonFiniteLossError(RuntimeError):
    """NaN or Inf in the loss; the batch was dumped."""


class QeRLTrainer(GRPOTrainer):
    """GRPO / DAPO with frozen packed weights, 16-bit LoRA, engine rollouts and AQN.

    Args:
        model: local folder (16-bit or packed checkpoint), or a model from :func:`qerl.nn.loading.load_model`, PEFT
            -wrapped or not.
        reward_funcs: TRL's convention: ``fn(prompts, completions, **columns) -> list[float | None]``.
        args: :class:`QeRLConfig`.
        train_dataset: rows with a ``prompt`` (messages or text) and any columns for the rewards.
        processing_class: tokenizer; default: the model folder's.
        peft_config: LoRA config; default: from ``args.lora_*``.
        eval_max_new_tokens: longest completion that evaluations through ``engine`` will ask for.
        **kwargs: passed to TRL (``eval_dataset``, ``callbacks``, ``optimizers``, ``tools``, ...).

    Raises:
        ConfigError: anything that can be known to fail before step 1.
        RewardArgumentError: a reward function that cannot be called with the columns of the data.
    """

    _tag_names = ("trl", "grpo", "qerl")
    _name = "QeRL"

    def __init__(
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        reward_funcs: Any,
        args: QeRLConfig,
        train_dataset: Dataset,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: LoraConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        eval_max_new_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        rewards = timed(reward_funcs)
        if isinstance(train_dataset, Dataset):
            has_environments = kwargs.get("environment_factory") is not None
            check_reward_arguments(rewards, train_dataset.column_names, environments=has_environments)
        set_seed(args.seed)  # the adapter is initialized before transformers seeds anything
        model, processing_class = load_policy(model, args, processing_class)
        peft_config = adapter_config(model, args, peft_config)
        longest_prompt = None
        if isinstance(train_dataset, Dataset):
            train_dataset, longest_prompt = check_prompts(train_dataset, processing_class, args, kwargs.get("tools"))
            longest_eval = longest_eval_prompt(kwargs.get("eval_dataset"), processing_class, args, kwargs.get("tools"))
            longest_prompt = max(longest_prompt, longest_eval)
        super().__init__(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            **kwargs,
        )
        # Every rank reads the packed weights itself, and may hold them in another layout than the first one: DDP must
        # not overwrite them with the first rank's bytes. (torch has no public name for this list.)
        self.model._ddp_params_and_buffers_to_ignore = packed_parameters(self.model)
        self._rewards_tried = not args.try_rewards or kwargs.get("environment_factory") is not None
        self._timed_rewards = [f for f in rewards if isinstance(f, TimedReward)]
        self._low_ess_rollouts = 0
        self._rewards_per_func: torch.Tensor | None = None
        self._prepared: PreparedBatch | None = None
        self.dynamic = make_dynamic_sampling(self, kwargs)
        self._install_rollouts(longest_prompt, eval_max_new_tokens or 0)

    def _install_rollouts(self, longest_prompt: int | None, eval_max_new_tokens: int) -> None:
        """Engine, noise and bridge over the wrapped model; print the memory budget; try the worst case."""
        args = self.args
        policy = self.accelerator.unwrap_model(self.model)
        if policy.config._attn_implementation != PACKED_ATTENTION:
            raise ConfigError(f"load the model with qerl.nn.loading.load_model (attention {PACKED_ATTENTION!r})")
        prompt_len = longest_prompt or args.max_prompt_length
        if prompt_len is None:
            raise ConfigError("max_prompt_length is needed with a streaming dataset: the KV cache is sized from it")
        # A tool call appends to the prompt at most what the completion budget allows, then samples again.
        turns = 2 if self.tools else 1
        max_model_len = prompt_len + turns * self.max_completion_length
        install_scoring_head(causal_model(policy), self.temperature)
        memory_bytes = None if args.kv_cache_gb is None else int(args.kv_cache_gb * 1024**3)
        self.engine = make_engine(
            policy,
            self.processing_class,
            max_model_len=max_model_len,
            useful_model_len=(args.max_prompt_length or prompt_len)
            + max(self.max_completion_length, eval_max_new_tokens),
            backend=args.rollout_backend,
            max_num_seqs=args.max_num_seqs,
            memory_bytes=memory_bytes,
            speculative_tokens=args.speculative_tokens,
            speculative_max_batch=args.speculative_max_batch,
            speculative_history=args.speculative_history,
        )
        self.noise = self._make_noise(policy)
        self.vllm_generation = RolloutBridge(self, self.engine, self.noise, max_model_len)
        self.use_vllm = True  # from here on TRL samples through the bridge
        self.vllm_mode = "colocate"
        self._last_loaded_step = -1
        shadow_bytes, kv_bytes = 0, 0
        if isinstance(self.engine, RolloutEngine):
            shadow_bytes = self.engine.runner.shadows.bytes
            rows = args.per_device_train_batch_size * args.steps_per_generation
            kv_bytes = memory_bytes or kv_cache_bytes(self.engine, rows, prompt_len, max_model_len)
        table = format_memory_table(memory_table(policy, shadow_bytes, kv_bytes))
        logger.info(table)
        try_worst_case(self, prompt_len, table)

    def _make_noise(self, policy: nn.Module) -> NoiseInjector | None:
        if self.args.aqn_schedule == "none":
            return None
        norms = aqn_norms(policy)
        expected = 2 * policy.config.num_hidden_layers
        if len(norms) != expected:
            raise ConfigError(
                f"AQN found {len(norms)} norms to perturb, expected {expected} (two a layer); set aqn_schedule='none' "
                "to train this architecture without noise"
            )
        warn_of_skipped_stages(self.args)
        return NoiseInjector(norms, self.args.seed)

    @property
    def bridge(self) -> RolloutBridge:
        """The stand-in that samples for TRL."""
        return self.vllm_generation

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Packed log-probs [B, C] (and entropies) of the last ``logits_to_keep`` tokens; see TRL for the arguments."""
        if compute_aux_loss:
            raise NotImplementedError("router losses of mixture-of-experts models are not supported")
        batch_size = batch_size or input_ids.shape[0]
        parts = [
            packed_logprobs(model, ids, mask, logits_to_keep)
            for ids, mask in zip(input_ids.split(batch_size), attention_mask.split(batch_size), strict=True)
        ]
        logps = torch.cat([p[0] for p in parts])
        return logps, torch.cat([p[1] for p in parts]) if compute_entropy else None, None

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """TRL's, with the rows of a freshly generated batch dealt to the micro-batches by whole groups."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = regroup(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation and scoring, plus effective sample size and policy mismatch in the metrics."""
        if self.dynamic is not None and self.model.training:
            self._prepared = self.dynamic.prepare(self, inputs)
            inputs = self._prepared.inputs
            for reward in self._timed_rewards:
                reward.answers = [row.get("answer") for row in inputs]
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._prepared = None
        self._zero_equal_groups(output)
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if mode == "train":
            metrics["aqn/sigma"].append(self.bridge.sigma)
            if self.bridge.parity is not None:
                metrics["parity/mean"].append(self.bridge.parity.mean)
                metrics["parity/max"].append(self.bridge.parity.max)
        if "importance_sampling_ratio" in output:
            self._log_importance(output, metrics, mode)
        return output

    def sample_batch(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's ``_generate`` of this rank's prompts (whole groups over all ranks), metrics included."""
        return super()._generate(prompts)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's generation, or what dynamic sampling has chosen from it."""
        return self.sample_batch(prompts) if self._prepared is None else self._prepared.generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's rewards [rows over all ranks, functions]; infinite ones are refused, not silently dropped.

        Raises:
            RewardValueError: naming the function and the rows.
        """
        if self._prepared is not None:
            self._rewards_per_func = self._prepared.rewards
            return self._prepared.rewards
        rewards = super()._calculate_rewards(*args, **kwargs)
        infinite = rewards.isinf()
        if bool(infinite.any()):
            row, function = infinite.nonzero()[0].tolist()
            raise RewardValueError(
                f"reward function {self.reward_func_names[function]!r} returned {float(rewards[row, function])} for "
                f"row {row} (and {int(infinite.sum()) - 1} more infinite values); return a finite number, or None to "
                "leave a sample out"
            )
        self._rewards_per_func = rewards
        return rewards

    def _zero_equal_groups(self, output: dict[str, Any]) -> None:
        """Exactly zero advantage where a group's rewards are all equal (a mean of equal floats need not equal them)."""
        advantages = output["advantages"]
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        groups = self._rewards_per_func.view(-1, group_size, len(self.reward_funcs))
        first = groups[:, :1]
        same = (groups == first) | (groups.isnan() & first.isnan())
        equal = same.all(dim=(1, 2)).repeat_interleave(group_size)
        start = self.accelerator.process_index * advantages.shape[0]
        advantages.masked_fill_(equal[start : start + advantages.shape[0]], 0.0)

    def _log_importance(self, output: dict[str, Any], metrics: dict[str, list[float]], mode: str) -> None:
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"])[mask.bool()]
        if difference.numel() == 0:
            return
        metrics["sampling/kl"].append(float((difference.exp() - 1 - difference).mean()))
        ess = effective_sample_size(difference.exp())
        metrics["sampling/ess"].append(ess)
        if mode != "train" or self.args.min_ess == 0:
            return
        self._low_ess_rollouts = self._low_ess_rollouts + 1 if ess < self.args.min_ess else 0
        if self._low_ess_rollouts >= self.args.min_ess_patience:
            raise CollapsedSamplingError(
                f"the effective sample size stayed below {self.args.min_ess} for {self._low_ess_rollouts} rollouts "
                f"(now {ess:.3f}): samples come from a policy too far from the trained one. Lower sigma_start or the "
                "learning rate, or update more often per rollout (num_iterations=1)."
            )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss; a loss that is not finite stops the run with a dump of the batch.

        Raises:
            NonFiniteLossError: naming the dump (safetensors, ids and log-probs).
        """
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not bool(torch.isfinite(loss.detach())):
            raise NonFiniteLossError(self._dump_batch(loss, inputs))
        return loss

    def _dump_batch(self, loss: torch.Tensor, inputs: dict[str, Any]) -> str:
        tensors = {k: v.detach().cpu().contiguous() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"nonfinite-step{self.state.global_step + 1}.safetensors"
        save_file(tensors, path)
        odd = [k for k, v in tensors.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
        return (
            f"loss is {float(loss.detach())} at step {self.state.global_step + 1}; the batch is in {path}"
            + (f", already not finite in {', '.join(odd)}" if odd else "")
            + ". The last checkpoint is unaffected; resume from it with a lower learning rate."
        )

    def try_rewards(self) -> None:
        """Call the user's reward functions once (``args.try_rewards``), unless that was done before.

        Not in the constructor: a function may refer to the trainer that it is given to.

        Raises:
            RewardCallError: one that fails on a made-up group of the first row.
        """
        if not self._rewards_tried:
            try_rewards(self)
        self._rewards_tried = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's training; the policy is clean again afterwards, also when it fails. Rewards are tried first."""
        self.try_rewards()
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.noise is not None:
                self.noise.clear()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Left to itself, PEFT takes the state dict of the whole model, a second copy of weights in tiles."""
        adapters = {name: value for name, value in self.model.named_parameters() if "lora_" in name}
        super()._save(output_dir, state_dict or adapters or None)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Not written: TRL's card knows bases on the hub only and calls a local one None; PEFT's card names it."""

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        """TRL's prompt order as a function of seed and epoch, so that a resume continues it."""
        sampler = super()._get_train_sampler(dataset)
        return EpochRepeatSampler(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's evaluation under the clean policy, whatever the noise scope."""
        if self.noise is None:
            return super().evaluate(*args, **kwargs)
        with self.noise.suspended():
            return super().evaluate(*args, **kwargs)

    @property
    def last_answers(self) -> list[Any]:
        """Golds of the last scored batch, where the data set has an ``answer`` column."""
        return next((f.answers for f in self._timed_rewards if f.answers), [])

    def take_reward_seconds(self) -> float:
        """Seconds spent in reward functions since the last call."""
        return sum(f.take_seconds() for f in self._timed_rewards)
