"""Data and reward of the tiny training runs."""

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback


def letter_reward(prompts: list, completions: list, **kwargs: object) -> list[float]:
    """Share of lower-case letters (about 0.1 of the bytes): varies within a group even for a random model."""
    texts = [c[0]["content"] for c in completions]
    return [sum("a" <= c <= "z" for c in text) / max(len(text), 1) for text in texts]


def prompts_dataset(count: int = 12) -> Dataset:
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "answer": str(i)} for i in range(count)]
    return Dataset.from_list(rows)


class Logs(TrainerCallback):
    """All logged dicts, and the largest noise seen at each step's end."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.rows.append(dict(logs))

    def values(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if name in row]

    def worst(self, name: str) -> float:
        """The largest value; NaN if one is (Python's ``max`` would lose it)."""
        return float(np.max(self.values(name)))
