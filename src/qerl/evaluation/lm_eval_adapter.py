"""Our engine as a model of EleutherAI's lm-evaluation-harness (``pip install 'qerl[eval]'``).

::

    lm_eval --model qerl --model_args pretrained=DIR,weights=nvfp4,adapter=RUN --tasks gsm8k
    python -m qerl.evaluation.lm_eval_cli --model qerl ...      # the same, where the harness knows no plugins

Releases of the harness after 0.4.13 find the name ``qerl`` by themselves, through the package's entry point in the
group ``lm_eval.models`` (docs/plugins.md of the harness). Release 0.4.13 resolves names against its own table only,
and ``--include_path`` is for tasks: there :mod:`qerl.evaluation.lm_eval_cli` registers the model and hands over to the
harness's command line, with all of its options. In Python, importing this module registers the name as well::

    import qerl.evaluation.lm_eval_adapter
    lm_eval.simple_evaluate(model="qerl", model_args={"pretrained": DIR}, tasks=["gsm8k"])

Generation runs on the rollout engine; log-likelihoods on a padding-free forward of the same loaded weights.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from qerl.evaluation.fingerprint import model_fingerprint
from qerl.evaluation.loglikelihood import TokenPair, score_continuations
from qerl.evaluation.stop_strings import StopTokens
from qerl.rollout.build import build_engine
from qerl.rollout.core import SamplingParams
from qerl.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)

# Prompts of one engine call: enough to keep it full, few enough that --use_cache keeps what was done.
_PROMPTS_PER_CALL = 1024
_SAMPLING_NAMES = ("top_p", "top_k", "min_p", "seed")
_READ_ELSEWHERE = frozenset({"until", "max_gen_toks", "do_sample", "temperature"})
# Options of other backends that tasks set to the value at which they do nothing.
_WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0}


@register_model("qerl")
class QerlLM(TemplateLM):
    """A local model with 16-bit or 4-bit weights, with or without a LoRA adapter.

    Args:
        pretrained: folder with config.json and safetensors (16-bit or packed).
        weights: ``auto`` (as stored), ``bf16``, ``nvfp4``, ``nf4`` or ``mxfp4``.
        head: output head: ``auto`` (as stored), ``bf16`` or ``nvfp4``.
        adapter: PEFT adapter folder.
        device, dtype: as in :func:`qerl.rollout.build.build_engine`.
        max_length: longest prompt + completion; default: the model's positions. Longer inputs lose tokens on their
            left, with a warning.
        max_gen_toks: token limit where a task states none.
        max_num_seqs: sequences decoded at once.
        max_batch_tokens: tokens of one forward pass of log-likelihoods.
        seed: seed of sampling.
        think_end_token: text up to and with it is dropped from generated answers.
        enable_thinking: passed to the chat template.
        batch_size, max_batch_size: the harness passes them to every model; the engine schedules by itself and does
            not read them.

    Raises:
        FileNotFoundError: ``pretrained`` is no local model folder.
        ValueError: bad options, or one of several processes (the engine runs in one).
    """

    def __init__(
        self,
        pretrained: str,
        weights: str = "auto",
        head: str = "auto",
        adapter: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 8192,
        seed: int = 0,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes > 1:
            raise ValueError(f"WORLD_SIZE is {processes}: the qerl model runs in 1 process; start lm_eval without a "
                             "launcher and choose the GPU with device=cuda:N")  # fmt: skip
        self.engine, self.tokenizer, self._model = build_engine(
            pretrained,
            weights=weights,
            head=head,
            adapter=adapter,
            device=device or "auto",
            dtype=dtype,
            max_model_len=int(max_length or _positions(pretrained)),
            max_num_seqs=int(max_num_seqs),
        )
        self._packed = isinstance(self.engine, RolloutEngine)
        self._stop_tokens = StopTokens(self.tokenizer)
        self._info = {
            "qerl_weights": self._causal.qerl_weights,
            "qerl_head": self._causal.qerl_head,
            "qerl_adapter": adapter,
        }
        self._info["model_fingerprint"] = model_fingerprint(
            Path(pretrained), None if adapter is None else Path(adapter)
        )
        self._max_gen_toks, self._max_batch_tokens, self._seed = int(max_gen_toks), int(max_batch_tokens), int(seed)
        self._think_end_token = think_end_token
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def _causal(self) -> Any:
        return self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model

    @property
    def device(self) -> Any:
        return self._causal.get_input_embeddings().weight.device

    @property
    def max_length(self) -> int:
        """Longest prompt + completion, tokens."""
        return self.engine.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """Token limit of tasks that state none."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on: BOS, or EOS where the tokenizer has no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness stores with the results: weight format, adapter, fingerprint, dtype."""
        return {**self._info, "model_dtype": str(self._causal.get_input_embeddings().weight.dtype)}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, but no second BOS before a text that has one."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.bos_token)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without ``add_generation_prompt`` its last message is left open."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_options,
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        cut = sum(len(pair[0]) < len(context) for pair, (_, context, _) in zip(pairs, requests, strict=True))
        self._warn_cut(cut, len(pairs))
        with tqdm(total=len(pairs), desc="qerl: log-likelihoods", disable=disable_tqdm) as bar:
            scores = score_continuations(
                self._model,
                pairs,
                max_batch_tokens=self._max_batch_tokens,
                packed=self._packed,
                progress=bar.update,
            )
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _fit(self, context: list[int], continuation: list[int]) -> TokenPair:
        """The pair, its context cut on the left; the last token is predicted, not read, so one more fits."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}")
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in disjoint windows of at most ``max_length`` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions cut at the first stop string; the samples of a repeated request differ when sampled."""
        groups: dict[tuple[SamplingParams, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._generation(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="qerl: generation", disable=disable_tqdm) as bar:
            for (sampling, stops), numbers in groups.items():
                prompts = self._prompts([requests[number].args[0] for number in numbers], sampling.max_tokens)
                for start in range(0, len(numbers), _PROMPTS_PER_CALL):
                    part = slice(start, start + _PROMPTS_PER_CALL)
                    outputs = self.engine.generate(prompts[part], sampling, prompt_ids=numbers[part])
                    for number, [output] in zip(numbers[part], outputs, strict=True):
                        texts[number] = self._text(output.token_ids, stops)
                        self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                    bar.update(len(outputs))
        return [texts[number] for number in range(len(requests))]

    def _generation(self, gen_kwargs: dict[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
        """What a request's options mean here: sampling, and the stop strings (EOS included).

        Raises:
            ValueError: options that would change the result and are not supported.
        """
        options: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        known = (*_READ_ELSEWHERE, *_SAMPLING_NAMES)
        refused = [f"{k}={v!r}" for k, v in options.items() if k not in known and _WITHOUT_EFFECT.get(k) != v]
        if refused:
            raise ValueError(
                f"generation options not supported: {', '.join(refused)}; known: {', '.join(sorted(known))}"
            )
        temperature = float(options.get("temperature", 0.0)) if options["do_sample"] else 0.0
        if options["do_sample"] and temperature == 0:
            raise ValueError(
                "do_sample=True needs a temperature above 0; set temperature, or do_sample=False for greedy"
            )
        stops = tuple(handle_stop_sequences(list(options["until"]), self.tokenizer.decode([self.eot_token_id])))
        sampling = SamplingParams(
            max_tokens=options["max_gen_toks"],
            temperature=temperature,
            top_p=float(options.get("top_p", 1.0)),
            # -1 is "off" to vLLM, 0 to us
            top_k=max(0, int(options.get("top_k", 0))),
            min_p=float(options.get("min_p", 0.0)),
            seed=int(options.get("seed", self._seed)),
            stop_token_ids=self._stop_tokens.containing(stops),
        )
        return sampling, stops

    def _prompts(self, contexts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Token ids of the contexts, cut on the left so that ``max_tokens`` fit behind them."""
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(f"{max_tokens} new tokens leave no room for a prompt within max_length={self.max_length}; "
                             "lower max_gen_toks or raise max_length")  # fmt: skip
        encoded = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        self._warn_cut(sum(len(ids) > room for ids in encoded), len(encoded))
        return [ids[-room:] for ids in encoded]

    def _warn_cut(self, cut: int, count: int) -> None:
        if cut:
            logger.warning(
                "%d of %d inputs exceed max_length=%d and lost tokens on the left", cut, count, self.max_length
            )

    def _text(self, token_ids: Sequence[int], stops: tuple[str, ...]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return postprocess_generated_text(text, list(stops), self._think_end_token)


def _positions(model: str) -> int:
    """``max_position_embeddings`` of a local model."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{model} holds no model (no config.json): give pretrained=LOCAL_FOLDER")
    return json.loads(path.read_text(encoding="utf-8"))["max_position_embeddings"]
