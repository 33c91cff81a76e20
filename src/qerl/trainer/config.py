"""QeRLConfig: TRL's ``GRPOConfig`` plus what quantized rollouts and AQN need.

Every TRL field keeps its name and meaning. Defaults that differ are the paper's (arXiv 2510.11696, table 4) or follow
from the engine; ``vllm_importance_sampling_*`` configures the correction between engine and trainer log-probs; TRL
fields that steer a vLLM process are refused with the replacement named.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig

from qerl.rl.schedule import SCHEDULES, NoiseSchedule
from qerl.rollout.config import MAX_SPECULATIVE_TOKENS

ROLLOUT_BACKENDS = ("auto", "engine", "transformers")
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
AQN_SCOPES = ("rollout", "both")
OVERLONG_PROMPTS = ("drop", "error")

# TRL fields that only make sense for a vLLM process, and what to use here.
_REPLACED_FIELDS = {
    "use_vllm": "rollout_backend",
    "vllm_mode": "rollout_backend",
    "vllm_model_impl": "rollout_backend",
    "vllm_enable_sleep_mode": "kv_cache_gb",
    "vllm_structured_outputs_regex": "a format reward",
    "vllm_server_base_url": "rollout_backend",
    "vllm_server_host": "rollout_backend",
    "vllm_server_port": "rollout_backend",
    "vllm_server_timeout": "rollout_backend",
    "vllm_group_port": "rollout_backend",
    "vllm_gpu_memory_utilization": "kv_cache_gb",
    "vllm_max_model_length": "max_prompt_length and max_completion_length",
    "vllm_tensor_parallel_size": "one engine per GPU (data parallel)",
    "use_transformers_continuous_batching": "rollout_backend",
    "transformers_continuous_batching_config": "rollout_backend",
    "use_transformers_paged": "rollout_backend",
    "cache_implementation": "rollout_backend",
    "generation_kwargs": "temperature, top_p, top_k, min_p, max_completion_length",
}


class ConfigError(ValueError):
    """A configuration that cannot work; the message says which field and what to change."""


def _help(text: str) -> dict[str, Any]:
    return {"help": text}


@dataclass
class QeRLConfig(GRPOConfig):
    """Arguments of :class:`qerl.trainer.trainer.QeRLTrainer`; see the module docstring."""

    # The paper's settings where it states them.
    learning_rate: float = field(default=1e-5, metadata=_help("Peak learning rate (paper: 1e-5, 5e-6 for bf16)."))
    num_generations: int | None = field(default=8, metadata=_help("Samples per prompt (the group size)."))
    epsilon_high: float | None = field(default=0.28, metadata=_help("Upper clip of DAPO's asymmetric range."))
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata=_help("How the engine/trainer ratio enters the loss (TRL's modes)."),
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=2.0, metadata=_help("Cap C of the truncated importance weights.")
    )
    logging_steps: float = field(default=1, metadata=_help("Log every N updates."))
    bf16: bool | None = field(
        default=False,
        metadata=_help("Autocast; off, because modules run in `dtype` and round like the engine."),
    )
    gradient_checkpointing: bool | None = field(
        default=None, metadata=_help("Recompute activations in the backward pass; default: on with CUDA.")
    )

    # Weights and adapter.
    weights: str = field(
        default="auto", metadata=_help("Frozen base weights: auto (as stored), bf16, nvfp4, nf4 or mxfp4.")
    )
    head: str = field(
        default="auto", metadata=_help("Output head, trainer and engine alike: auto (as stored), bf16 or nvfp4.")
    )
    dtype: str = field(
        default="auto",
        metadata=_help("Compute dtype: auto (bfloat16 on CUDA, float32 on CPU), bfloat16, float32."),
    )
    lora_r: int = field(default=32, metadata=_help("LoRA rank, used when no peft_config is given."))
    lora_alpha: int = field(default=64, metadata=_help("LoRA alpha, used when no peft_config is given."))
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata=_help("Projection names that get LoRA; default: all linears of the decoder layers."),
    )

    # Adaptive quantization noise.
    aqn_schedule: str = field(
        default="exponential",
        metadata=_help(f"Noise schedule: {', '.join(SCHEDULES)} ('none' turns AQN off)."),
    )
    aqn_scope: str = field(
        default="rollout",
        metadata=_help("'rollout': noise while sampling only; 'both': the same sample while training on the batch."),
    )
    sigma_start: float = field(default=1e-2, metadata=_help("Noise sigma of the first noisy stage."))
    sigma_end: float = field(default=5e-4, metadata=_help("Noise sigma of the last stage."))
    num_stages: int = field(default=10, metadata=_help("Stages of the schedule; stage 0 has no noise."))

    # DAPO's dynamic sampling.
    dynamic_sampling: bool = field(
        default=False, metadata=_help("Sample further prompts in place of groups whose rewards are all equal (DAPO).")
    )
    max_dynamic_rounds: int = field(
        default=10, metadata=_help("Batches sampled for one update at most by dynamic_sampling, the first included.")
    )
    dynamic_sampling_reward: str | None = field(
        default=None,
        metadata=_help("Reward function that must differ inside a group; default: the weighted sum of all."),
    )

    # Rollout engine.
    rollout_backend: str = field(
        default="auto",
        metadata=_help("auto (the engine, or transformers for unknown architectures), engine or transformers."),
    )
    max_prompt_length: int | None = field(
        default=1024, metadata=_help("Longest prompt in tokens, checked before step 1 (None: no limit).")
    )
    overlong_prompts: str = field(
        default="drop", metadata=_help("Prompts over max_prompt_length: 'drop' (counted) or 'error'.")
    )
    kv_cache_gb: float | None = field(
        default=None, metadata=_help("GB for the engine's KV cache; default: what the batch needs at most.")
    )
    max_num_seqs: int = field(default=256, metadata=_help("Sequences decoded at once."))
    speculative_tokens: int = field(
        default=0,
        metadata=_help("Tokens guessed ahead for a sample while few run (0: off); only rounding changes."),
    )
    speculative_max_batch: int = field(
        default=8, metadata=_help("Running samples up to which speculative_tokens are guessed.")
    )
    speculative_history: int = field(
        default=0, metadata=_help("Tokens of earlier completions kept to guess from when a prompt comes again.")
    )

    # Guards.
    try_rewards: bool = field(
        default=True,
        metadata=_help("Call own reward functions on a made-up group before anything is generated, to find mistakes."),
    )
    parity_tokens: int = field(
        default=512, metadata=_help("Sampled tokens re-scored by the trainer at every rollout (0: no probe).")
    )
    parity_warn: float = field(
        default=0.03, metadata=_help("Mean |log-prob difference| engine vs trainer that raises an alarm.")
    )
    parity_stop: float = field(
        default=0.5,
        metadata=_help("Mean |log-prob difference| that stops the run: the engine runs another policy."),
    )
    min_ess: float = field(
        default=0.3,
        metadata=_help("Stop when the effective sample size (share) stays below this (0: never)."),
    )
    min_ess_patience: int = field(default=5, metadata=_help("Consecutive rollouts below min_ess before the stop."))

    def __post_init__(self) -> None:
        # transformers and TRL overwrite fields with what follows from others, and refuse some of that as input.
        self._given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        self._refuse_replaced_fields()
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = torch.cuda.is_available() and not self.use_cpu
        if self.use_cpu or not torch.cuda.is_available():
            self.dataloader_pin_memory = False
        for name in ("num_generations", "max_completion_length"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} must be a number: the batch and the KV cache are sized from it.")
        if self.cast_lm_head_to_fp32:
            raise ConfigError("cast_lm_head_to_fp32 is not needed: logits are fp32 from the matmul on; leave it off.")
        if self.num_generations < 2:
            raise ConfigError(
                f"num_generations={self.num_generations}: a group of one has no baseline, so every advantage is 0. "
                "Use at least 2 (8 in the paper)."
            )
        self._check_group_fits()
        super().__post_init__()
        self._check()

    def _check_group_fits(self) -> None:
        """In the user's words what TRL says of a field that is mostly derived."""
        if self.generation_batch_size is not None or self.steps_per_generation is not None:
            return
        batch = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 and batch % self.num_generations != 0:
            raise ConfigError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} x gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} = {batch} samples hold no whole number of groups of "
                f"num_generations={self.num_generations}: make it a multiple"
            )

    def _refuse_replaced_fields(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
        for name, replacement in _REPLACED_FIELDS.items():
            if name in defaults and getattr(self, name) != defaults[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r}: no vLLM process is involved; use {replacement}.")

    def _check(self) -> None:
        self._check_choice("aqn_scope", AQN_SCOPES)
        self._check_choice("rollout_backend", ROLLOUT_BACKENDS)
        self._check_choice("overlong_prompts", OVERLONG_PROMPTS)
        self._check_choice("weights", ("auto", "bf16", "nvfp4", "nf4", "mxfp4"))
        NoiseSchedule(self.aqn_schedule, self.sigma_start, self.sigma_end, self.num_stages, total_updates=1)
        if self.bf16 or self.fp16:
            raise ConfigError("bf16/fp16 autocast would round unlike the engine; set dtype='bfloat16' instead.")
        truncated = {"top_p": self.top_p != 1.0, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        if any(truncated.values()):
            raise ConfigError(
                f"{', '.join(k for k, v in truncated.items() if v)}: training on a truncated distribution needs its "
                "mask replayed in the trainer, which is not supported. Use top_p=1, top_k=0, min_p=None (temperature "
                "is fine)."
            )
        if self.repetition_penalty != 1.0:
            raise ConfigError("repetition_penalty must be 1 in training: it makes sampled log-probs history dependent.")
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature}: groups of equal greedy samples carry no signal.")
        if self.dynamic_sampling and self.max_dynamic_rounds < 2:
            raise ConfigError(
                f"max_dynamic_rounds={self.max_dynamic_rounds} samples nothing anew: use at least 2, or turn "
                "dynamic_sampling off"
            )
        for name in ("lora_r", "max_num_seqs", "min_ess_patience", "speculative_max_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        self._check_speculation()
        self._check_choice("loss_type", LOSS_TYPES)
        self._check_choice("importance_sampling_level", ("token", "sequence"))
        self._check_save_boundary()

    def _check_speculation(self) -> None:
        for name in ("speculative_tokens", "speculative_history"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0")
        if self.speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(f"speculative_tokens={self.speculative_tokens} must be at most {MAX_SPECULATIVE_TOKENS}")
        if self.speculative_history and not self.speculative_tokens:
            raise ConfigError(
                f"speculative_history={self.speculative_history} keeps completions to guess from, but "
                "speculative_tokens=0 guesses nothing: set speculative_tokens, or leave speculative_history at 0"
            )
        if self.speculative_tokens and self.rollout_backend == "transformers":
            raise ConfigError(
                f"speculative_tokens={self.speculative_tokens} needs the engine: set rollout_backend to auto or engine"
            )

    def given_values(self) -> dict[str, Any]:
        """The fields as plain values for YAML, from which an equal config can be made.

        Fields that follow from others or from the machine are as they were given (mostly None). Left out are tokens and
        other secrets, objects, and ``resume_from_checkpoint``, which says how to start a run, not what it is.
        """
        values = {}
        for name, value in self._given.items():
            value = getattr(value, "value", value)
            plain = isinstance(value, (str, int, float, bool, list, dict)) or value is None
            if plain and not name.endswith("_token") and name != "resume_from_checkpoint":
                values[name] = value
        return values

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose from {', '.join(choices)}")

    @property
    def updates_per_generation(self) -> int:
        """Optimizer updates after which a generated batch and an update end together."""
        micro_steps = self.steps_per_generation * self.num_iterations
        return math.lcm(micro_steps, self.gradient_accumulation_steps) // self.gradient_accumulation_steps

    def _check_save_boundary(self) -> None:
        """Buffered completions are not checkpointed, so a checkpoint must fall between two generations."""
        every = self.updates_per_generation
        strategy = getattr(self.save_strategy, "value", self.save_strategy)
        if every == 1 or strategy == "no":
            return
        if strategy != "steps" or self.save_steps < 1 or self.save_steps % every != 0:
            raise ConfigError(
                f"save_strategy={strategy!r} with save_steps={self.save_steps:g}: save_steps must be a multiple of "
                f"{every} (updates made from one generated batch): a checkpoint in between could not be resumed with "
                "the same samples."
            )
