r"""Settings of the paper's benchmarks, close to lighteval's, stated in full.

QeRL (arXiv 2510.11696) reports GSM8K, MATH-500, AIME 2024 and 2025 and AMC 23. Its reference code does not settle how
they were measured: its lighteval command asks for 8192 new tokens within a context of 6144, so that no completion can
reach its limit and the context cuts first; its own script (eval/gsm8k.py) samples at temperature 0.8, top-p 0.95, with
4096 new tokens when the path contains "checkpoint" or "ckpt" and 2048 otherwise, and so gives trained and untrained
models different limits. Numbers of other papers are therefore not comparable to the digit, and neither are ours to
theirs. What we use is below (``qerl eval MODEL --preset math500``); a result stores all of it.

Ours, for every model alike: 8192 new tokens after a prompt of at most 2048, in a context that holds both (4096 new
tokens for GSM8K); temperature 0.6 and top-p 0.95, as is usual for sampled math, with enough samples a problem that the
mean moves by less than the interval over problems; GSM8K, whose 1,319 problems need no repeats, greedily.

lighteval itself (tasks read at commits 0d42edf and 01a0033) leaves temperature and top-p to the model's arguments and
sets: ``aime24`` no limit of its own, ``aime25`` 10,000 tokens, ``math_500`` 32,768, all pass@1 of 1 sample; ``gsm8k``
256 tokens with the stop sequence "Question:", in few-shot form. It has no AMC 23. Raise ``max_new_tokens`` for models
that think longer: the share of truncated completions, which every result has, says when.
"""

from dataclasses import dataclass

# The prompt of lighteval's AIME tasks (default_prompts.py, after simple-evals and Llama 3), braces of \boxed included.
LIGHTEVAL_MATH_PROMPT = (
    "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n"
    "{question}"
)
MAX_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EvalPreset:
    """How one benchmark is measured.

    Attributes:
        task: Name for :func:`qerl.tasks.load_task`.
        prompt: A style of ``qerl.tasks.prompts.STYLES`` or a text with ``{question}``.
        n: Samples per problem; the reported figure is their mean (avg@n), with its interval over problems.
        temperature, top_p, max_new_tokens: Sampling.
        lighteval: The task of lighteval that this is close to, "" where there is none.
    """

    task: str
    prompt: str
    n: int
    temperature: float
    top_p: float
    max_new_tokens: int
    lighteval: str

    @property
    def max_model_len(self) -> int:
        """Context that holds the longest prompt and the longest completion."""
        return MAX_PROMPT_TOKENS + self.max_new_tokens

    def task_options(self) -> dict[str, str]:
        """Options for :func:`qerl.tasks.load_task`."""
        return {"prompt": self.prompt}

    def sampling(self) -> dict[str, int | float]:
        """``n``, ``temperature``, ``top_p`` and ``max_new_tokens`` by name."""
        names = ("n", "temperature", "top_p", "max_new_tokens")
        return {name: getattr(self, name) for name in names}


PRESETS: dict[str, EvalPreset] = {
    "gsm8k": EvalPreset("gsm8k", "boxed", 1, 0.0, 1.0, 4096, "gsm8k"),
    "math500": EvalPreset("math500", LIGHTEVAL_MATH_PROMPT, 4, 0.6, 0.95, 8192, "math_500"),
    "aime24": EvalPreset("aime24", LIGHTEVAL_MATH_PROMPT, 32, 0.6, 0.95, 8192, "aime24"),
    "aime25": EvalPreset("aime25", LIGHTEVAL_MATH_PROMPT, 32, 0.6, 0.95, 8192, "aime25"),
    "amc23": EvalPreset("amc23", LIGHTEVAL_MATH_PROMPT, 32, 0.6, 0.95, 8192, ""),
}


def get_preset(name: str) -> EvalPreset:
    """The preset of a benchmark.

    Raises:
        ValueError: no such preset; lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
