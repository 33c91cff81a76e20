"""Two ranks (gloo, CPU): each samples its own part of the batch, they step as one, and one of them writes.

One job of two processes does everything; the tests look at what it left. The control is a run of one process with
the same global batch.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from two_ranks import train

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def job(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The job's folder, and what each rank reported."""
    folder = tmp_path_factory.mktemp("two_ranks")
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(24)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    common |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(HERE / "two_ranks.py"), str(tiny_checkpoints["qwen2"]), str(folder)]
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as output:
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("part", "rows", "shared"), [("plain", 8, 0), ("split", 6, 1)])
def test_the_ranks_sample_different_rows(job: tuple[Path, list[dict]], part: str, rows: int, shared: int) -> None:
    """Also where a group of four lies on both ranks: its prompt is then sampled by both."""
    first, second = (report[part]["seen"] for report in job[1])
    assert [step for step, _, _ in first] == [step for step, _, _ in second] == [0, 1]
    for (_, prompts_a, samples_a), (_, prompts_b, samples_b) in zip(first, second, strict=True):
        distinct = [{tuple(p) for p in prompts} for prompts in (prompts_a, prompts_b)]
        assert [len(prompts_a), len(prompts_b)] == [rows, rows]
        assert len(distinct[0] & distinct[1]) == shared
        assert len(distinct[0] | distinct[1]) == 2 * rows // 4
        samples = [tuple(s) for s in samples_a + samples_b]
        assert len(set(samples)) == 2 * rows, "no two rows drew from the same random stream"


def test_the_ranks_together_are_the_run_of_one_process(
    job: tuple[Path, list[dict]], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Same global batch, same samples; the gradient is the average over the ranks."""
    alone = train(str(tiny_checkpoints["qwen2"]), tmp_path / "alone", 16)
    ranks = [report["plain"] for report in job[1]]
    for update, (_, prompts, _) in enumerate(alone["seen"]):
        assert prompts == [p for rank in ranks for p in rank["seen"][update][1]]
    # later updates differ in the order of a sum, so only the first must agree in every sample
    assert alone["seen"][0][2] == [s for rank in ranks for s in rank["seen"][0][2]]
    assert ranks[0]["gradients"] == ranks[1]["gradients"]
    assert ranks[0]["gradients"][0] == pytest.approx(alone["gradients"][0], rel=1e-5)


def test_the_adapters_stay_equal_bit_for_bit(job: tuple[Path, list[dict]]) -> None:
    for part in ("plain", "split", "dynamic"):
        first, second = (report[part]["lora"] for report in job[1])
        assert first.keys() == second.keys() and len(first) > 0
        assert first == second
        assert any(any(values) for name, values in first.items() if "lora_B" in name), "it must have moved"


def test_turns_of_the_tool_loop_have_streams_of_their_own(job: tuple[Path, list[dict]]) -> None:
    """The same prompt on both ranks in three calls of one update: every row another sample."""
    samples = [tuple(s) for report in job[1] for turn in report["plain"]["turns"] for s in turn]
    assert len(samples) == 3 * 8 + 8 + 9 + 9
    assert len(set(samples)) == len(samples)


def test_dynamic_sampling_agrees_over_ranks(job: tuple[Path, list[dict]]) -> None:
    first, second = (report["dynamic"] for report in job[1])
    assert first["rounds"] == second["rounds"] and max(first["rounds"]) > 1
    assert first["filled"] == second["filled"] == [0.0, 0.0]
    assert first["zero"] == second["zero"] == [0.0, 0.0]
    assert [len(prompts) for _, prompts, _ in first["seen"]] == [len(prompts) for _, prompts, _ in second["seen"]]


def test_only_the_first_rank_evaluates_and_writes(job: tuple[Path, list[dict]]) -> None:
    folder, reports = job
    assert [report["run"]["evaluations"] for report in reports] == [["eval-before", "eval-after"], []]
    assert [report["run"]["steps"] for report in reports] == [2, 2]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["before"]["n"] == summary["after"]["n"] == 4
    checkpoint = folder / "run" / "checkpoint-2"
    assert {p.name for p in checkpoint.glob("adapter_model*")} == {"adapter_model.safetensors"}
    # what has to be of every rank is: the states of the random generators
    assert {p.name for p in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
