"""The public verifier cases: accuracy, no wrong acceptance, and no acceptance of golds with a digit changed."""

import json
import random
import re
from collections import Counter

import pytest

from qerl.tasks.extract import extract_answer
from qerl.tasks.verify import check_gold, verify
from qerl.tasks.workers import RewardPool

# rows whose two texts no rule can tell equal: prose paraphrased, or numbers that differ beyond rounding
KNOWN_MISSES = 26


@pytest.fixture(scope="module")
def rows(shared_dir):
    lines = (shared_dir / "data" / "verifier_cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if not row.get("dubious")]


def test_accuracy(rows):
    with RewardPool(1, deadline_s=20) as pool:
        outcomes = pool.verify([r["gold"] for r in rows], [r["prediction"] for r in rows])
    wrong = [(r, o) for r, o in zip(rows, outcomes, strict=True) if (o.score == 1.0) != r["expected"]]
    assert [r["id"] for r, _ in wrong if not r["expected"]] == []
    assert len(wrong) <= KNOWN_MISSES, Counter(r["id"] for r, _ in wrong)
    assert not any(o.counter in ("timeout", "exhausted") for o in outcomes)


@pytest.mark.parametrize("file", ["math500", "math_train", "bigmath_slice"])
def test_golds_equal_themselves_and_no_changed_digit(shared_dir, file):
    rng = random.Random(0)
    lines = (shared_dir / "data" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    golds = rng.sample(golds, min(len(golds), 600))
    checked = [gold for gold in golds if check_gold(gold) is None]
    assert len(checked) >= 0.93 * len(golds)
    accepted = []
    for gold in checked:
        assert verify(gold, extract_answer(f"so \\boxed{{{gold}}}"), extracted=True).equal, gold
        digits = [match.start() for match in re.finditer(r"\d", gold)]
        if digits:
            place = rng.choice(digits)
            other = gold[:place] + str((int(gold[place]) + rng.randint(1, 9)) % 10) + gold[place + 1 :]
            if verify(gold, other, extracted=True).equal:
                accepted.append((gold, other))
    # a digit in a name or beside \approx may be changed; of 15,442 golds of all files 6 are accepted
    assert len(accepted) <= 2, accepted
