"""The named tasks: their files in a local data folder, and where they are on the hub.

The hub ids, configurations, splits and column names are as other projects read them; none was tried against the hub
from here (development is offline). A name that has moved fails at load with the hub's own message; a column that is
not there is named together with those that are.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl.tasks.sources import Columns, HubDataset

_USUAL = Columns()


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a named task is: file names in a local data folder, and the hub data set with its split names.

    Attributes:
        columns: Column names on the hub. Local files have the usual names, whatever the hub calls them.
        programs: The answers are programs, scored on test cases (:mod:`qerl.tasks.code`).
    """

    hub: HubDataset
    train_file: str | None = None
    test_file: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    columns: Columns = _USUAL
    programs: bool = False

    def sides(self) -> tuple[tuple[str, str, str], ...]:
        """(side, file, split) of each side that the benchmark has."""
        both = (("train", self.train_file, self.train_split), ("test", self.test_file, self.test_split))
        return tuple((side, file, split) for side, file, split in both if file is not None and split is not None)


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        HubDataset("openai/gsm8k", "main"), "gsm8k_train.jsonl", "gsm8k_test.jsonl", "train", "test"
    ),
    "math500": Benchmark(HubDataset("HuggingFaceH4/MATH-500"), None, "math500.jsonl", None, "test"),
    "aime24": Benchmark(HubDataset("HuggingFaceH4/aime_2024"), None, "aime2024.jsonl", None, "train"),
    "aime25": Benchmark(HubDataset("math-ai/aime25"), None, "aime2025.jsonl", None, "test"),
    "amc23": Benchmark(HubDataset("math-ai/amc23"), None, "amc23.jsonl", None, "test"),
    "math": Benchmark(HubDataset("DigitalLearningGmbH/MATH-lighteval"), "math_train.jsonl", None, "train"),
    "bigmath": Benchmark(HubDataset("SynthLabsAI/Big-Math-RL-Verified"), "bigmath_slice.jsonl", None, "train"),
    "deepmath": Benchmark(HubDataset("zwhe99/DeepMath-103K"), "deepmath_slice.jsonl", None, "train"),
    "dapo17k": Benchmark(
        HubDataset("open-r1/DAPO-Math-17k-Processed", "en"), "dapo17k.jsonl", None, "train", None,
        Columns(question="prompt", answer="solution"),
    ),
    "miromind62k": Benchmark(
        HubDataset("miromind-ai/MiroMind-M1-RL-62K"), "miromind62k.jsonl", None, "train", None,
        Columns(question="problem", answer="clean_answer"),
    ),
    "codeforces": Benchmark(
        HubDataset("open-r1/codeforces", "verifiable"), "codeforces_train.jsonl", "codeforces_test.jsonl",
        "train", "test", programs=True,
    ),
}  # fmt: skip

# other names of tasks
ALIASES = {"countdown": "reasoning_gym:countdown"}
