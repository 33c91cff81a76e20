"""The control plane without tensors: a simulated cache checks what every step would read and write."""

import random

import pytest

from qerl.rollout.blocks import BlockAllocator
from qerl.rollout.kv_cache import blocks_for_tokens
from qerl.rollout.scheduler import Prefix, Sample, ScheduledStep, Scheduler


class Simulator:
    """Runs a scheduler with a dict for a cache; a sample's next token is a function of its history."""

    def __init__(self, num_blocks: int, block_size: int = 4, max_num_seqs: int = 8, max_batch_tokens: int = 64) -> None:
        self.block_size = block_size
        self.scheduler = Scheduler(BlockAllocator(num_blocks), block_size, max_num_seqs, max_batch_tokens)
        self.cache: dict[tuple[int, int], int] = {}
        self.targets: dict[Sample, int] = {}
        self.computed_tokens = 0

    def add(self, prompt_len: int, lengths: list[int]) -> Prefix:
        """Queue a group whose samples end after ``lengths`` tokens."""
        index = len({sample.prefix.index for sample in self.targets})
        group = Prefix(index, [1000 * index + at for at in range(prompt_len)])
        group.samples = [Sample(group, i, (0, 0), list(group.token_ids)) for i in range(len(lengths))]
        self.targets.update(zip(group.samples, lengths, strict=True))
        self.scheduler.add(group)
        return group

    def step(self) -> ScheduledStep:
        """One step, with every invariant checked before and after."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self._copy(step)
        self._write(step)
        for chunk in step.chunks:
            known = self._read(chunk.owner, chunk.end)
            assert known == chunk.owner.token_ids[: chunk.end], "the cache holds another history"
            if chunk.samples_from_last:
                assert chunk.end == len(chunk.owner.token_ids)
                for drawer in chunk.drawers:
                    self._append(drawer)
        self.scheduler.advance(step)
        self.scheduler.check_integrity()
        return step

    def run(self) -> list[ScheduledStep]:
        """Steps until everything is finished and every block is free."""
        steps = []
        while self.scheduler.unfinished:
            steps.append(self.step())
        assert self.scheduler.allocator.num_used == 0
        for sample, length in self.targets.items():
            assert sample.num_generated == length
            assert sample.finish_reason == "length"
        return steps

    def _append(self, sample: Sample) -> None:
        assert sample.finish_reason is None, "a finished sample was run"
        sample.token_ids.append(hash((tuple(sample.token_ids), sample.sample_index)) % 1000)
        sample.logprobs.append(0.0)
        if sample.num_generated == self.targets[sample]:
            sample.finish_reason = "length"

    def _copy(self, step: ScheduledStep) -> None:
        # The pool's contract: all sources are read before any destination is written.
        before = dict(self.cache)
        destinations = [destination for _, destination in step.copies]
        assert len(set(destinations)) == len(destinations)
        for source, destination in step.copies:
            for offset in range(self.block_size):
                self.cache[destination, offset] = before.get((source, offset), -1)

    def _write(self, step: ScheduledStep) -> None:
        written = set()
        tokens, next_tokens = 0, 0
        for chunk in step.chunks:
            tokens += chunk.count
            next_tokens += isinstance(chunk.owner, Sample) and chunk.count == 1 and chunk.samples_from_last
            assert chunk.count > 0
            for at in range(chunk.start, chunk.end):
                block, offset = chunk.owner.blocks[at // self.block_size], at % self.block_size
                assert self.scheduler.allocator.ref_count(block) == 1, "a shared block is written"
                assert (block, offset) not in written, "two tokens go to one slot"
                written.add((block, offset))
                self.cache[block, offset] = chunk.owner.token_ids[at]
        assert tokens - next_tokens <= self.scheduler.max_batch_tokens
        assert next_tokens <= self.scheduler.max_num_seqs
        self.computed_tokens += tokens

    def _read(self, owner: Prefix | Sample, end: int) -> list[int]:
        size = self.block_size
        return [self.cache[owner.blocks[at // size], at % size] for at in range(end)]


def test_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    simulator = Simulator(num_blocks=32)
    group = simulator.add(prompt_len=10, lengths=[3] * 4)
    first = simulator.step()
    assert [(chunk.owner, chunk.start, chunk.count) for chunk in first.chunks] == [(group, 0, 10)]
    assert [sample.num_generated for sample in group.samples] == [1, 1, 1, 1]
    prompt_blocks = list(group.blocks)
    second = simulator.step()
    assert [chunk.count for chunk in second.chunks] == [1, 1, 1, 1]
    assert all(sample.blocks[:2] == prompt_blocks[:2] for sample in group.samples)
    # The partial block: three writers take a copy, the last one owns the original and writes in place.
    assert [source for source, _ in second.copies] == [prompt_blocks[2]] * 3
    assert group.samples[-1].blocks[2] == prompt_blocks[2]
    assert simulator.scheduler.allocator.num_used == 2 + 4
    simulator.run()
    assert simulator.computed_tokens == 10 + 4 * 2


def test_single_sample_takes_over_its_prompt_without_a_copy() -> None:
    simulator = Simulator(num_blocks=8)
    simulator.add(prompt_len=10, lengths=[6])
    steps = simulator.run()
    assert not any(step.copies for step in steps)
    assert simulator.scheduler.allocator.peak_used == blocks_for_tokens(10 + 6 - 1, 4)


def test_prompt_of_whole_blocks_needs_no_copy() -> None:
    simulator = Simulator(num_blocks=32)
    simulator.add(prompt_len=8, lengths=[3] * 4)
    assert not any(step.copies for step in simulator.run())


def test_sample_that_ends_with_its_first_token_never_runs() -> None:
    simulator = Simulator(num_blocks=8)
    group = simulator.add(prompt_len=5, lengths=[1, 2, 1])
    steps = simulator.run()
    assert [[chunk.owner for chunk in step.chunks] for step in steps] == [[group], [group.samples[1]]]
    assert simulator.computed_tokens == 6


def test_long_prompt_is_cut_by_the_budget_and_mixed_with_decoding() -> None:
    simulator = Simulator(num_blocks=64, max_batch_tokens=8)
    first = simulator.add(prompt_len=6, lengths=[20])
    second = simulator.add(prompt_len=30, lengths=[2, 2])
    steps = simulator.run()
    assert [(c.owner is first, c.count) for c in steps[0].chunks] == [(True, 6), (False, 2)]
    pieces = [chunk for step in steps for chunk in step.chunks if chunk.owner is second]
    assert [chunk.count for chunk in pieces] == [2, 8, 8, 8, 4], "the token of the first sample comes on top"
    assert [chunk.samples_from_last for chunk in pieces] == [False] * 4 + [True]
    for step in steps[1:5]:
        assert step.chunks[0].owner is first.samples[0]


def test_number_of_running_sequences_is_bounded_and_freed_slots_are_refilled() -> None:
    simulator = Simulator(num_blocks=200, max_num_seqs=3)
    simulator.add(prompt_len=5, lengths=[9, 2, 9, 2, 9])
    simulator.add(prompt_len=5, lengths=[3])
    running = []
    while simulator.scheduler.unfinished:
        simulator.step()
        running.append(len(simulator.scheduler.running))
    assert max(running) == 3
    assert simulator.scheduler.peak_running == 3
    assert simulator.scheduler.preemptions == 0


def test_preemption_takes_the_last_arrived_and_loses_nothing() -> None:
    simulator = Simulator(num_blocks=8, max_num_seqs=4)
    groups = [simulator.add(prompt_len=4, lengths=[25]) for _ in range(4)]
    preempted = []
    while simulator.scheduler.unfinished:
        before = list(simulator.scheduler.running)
        count = simulator.scheduler.preemptions
        simulator.step()
        count = simulator.scheduler.preemptions - count
        unfinished = [sample for sample in before if sample.finish_reason is None]
        assert simulator.scheduler.running[: len(unfinished) - count] == unfinished[: len(unfinished) - count]
        preempted += unfinished[len(unfinished) - count :]
    assert preempted, "the cache was meant to be too small"
    assert groups[0].samples[0] not in preempted
    for group in groups:
        assert group.samples[0].token_ids == _reference(group, 25)


def _reference(group: Prefix, length: int, sample_index: int = 0) -> list[int]:
    tokens = list(group.token_ids)
    for _ in range(length):
        tokens.append(hash((tuple(tokens), sample_index)) % 1000)
    return tokens


def test_admission_leaves_running_samples_room_to_grow() -> None:
    # Each needs 4 of 8 blocks in the end but only 1 at first: without headroom all four would start and be preempted.
    simulator = Simulator(num_blocks=8, max_num_seqs=4)
    for _ in range(4):
        simulator.add(prompt_len=4, lengths=[13])
    simulator.run()
    assert simulator.scheduler.preemptions == 0
    assert simulator.scheduler.peak_running > 1


def test_preempted_sibling_shares_the_prompt_again() -> None:
    simulator = Simulator(num_blocks=12, max_num_seqs=4)
    group = simulator.add(prompt_len=16, lengths=[25] * 4)
    steps = simulator.run()
    assert simulator.scheduler.preemptions > 0
    # The prompt fills whole blocks that running siblings keep, so it is never computed again.
    assert sum(chunk.count for step in steps for chunk in step.chunks if chunk.owner is group) == 16
    for sample in group.samples:
        assert sample.token_ids == _reference(group, 25, sample.sample_index)


def test_prompts_are_prefilled_only_with_room_for_the_samples_before_them() -> None:
    simulator = Simulator(num_blocks=5)
    first = simulator.add(prompt_len=4, lengths=[4] * 4)
    second = simulator.add(prompt_len=4, lengths=[4])
    # One block is taken and the four samples are about to take one each.
    assert [chunk.owner for chunk in simulator.step().chunks] == [first]
    simulator.run()
    assert second.samples[0].token_ids == _reference(second, 4)


def test_request_that_just_fits_runs_alone_in_the_whole_cache() -> None:
    for prompt_len, length in [(1, 16), (13, 4), (16, 1), (7, 10)]:
        blocks = blocks_for_tokens(prompt_len + length - 1, 4)
        simulator = Simulator(num_blocks=blocks, max_num_seqs=4)
        groups = [simulator.add(prompt_len, [length] * 3) for _ in range(3)]
        simulator.run()
        for group in groups:
            for sample in group.samples:
                assert sample.token_ids == _reference(group, length, sample.sample_index)


@pytest.mark.parametrize("seed", range(60))
def test_random_work_in_small_caches(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.randint(1, 16)
    longest_prompt, longest = rng.randint(1, 40), rng.randint(1, 30)
    smallest = blocks_for_tokens(longest_prompt + longest - 1, block_size)
    simulator = Simulator(
        num_blocks=smallest + rng.choice([0, 1, 3, smallest, 5 * smallest]),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 20),
        max_batch_tokens=rng.choice([1, 2, 7, 32, 1000]),
    )
    groups = [
        simulator.add(rng.randint(1, longest_prompt), [rng.randint(1, longest) for _ in range(rng.randint(1, 6))])
        for _ in range(rng.randint(1, 12))
    ]
    simulator.run()
    for group in groups:
        for sample in group.samples:
            assert sample.token_ids == _reference(group, sample.num_generated, sample.sample_index)


def test_ten_thousand_requests() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockAllocator(2000), 16, max_num_seqs=256, max_batch_tokens=4096)
    targets = {}
    for index in range(2500):
        group = Prefix(index, [0] * rng.randint(1, 60))
        group.samples = [Sample(group, i, (0, 0), list(group.token_ids)) for i in range(4)]
        targets.update({sample: min(300, 1 + int(rng.expovariate(1 / 30))) for sample in group.samples})
        scheduler.add(group)
    steps = 0
    while scheduler.unfinished:
        step = scheduler.schedule()
        for chunk in step.chunks:
            for sample in chunk.drawers if chunk.samples_from_last else []:
                sample.token_ids.append(0)
                sample.logprobs.append(0.0)
                if sample.num_generated == targets[sample]:
                    sample.finish_reason = "length"
        scheduler.advance(step)
        steps += 1
        if steps % 100 == 0:
            scheduler.check_integrity()
    scheduler.check_integrity()
    assert scheduler.allocator.num_used == 0
    assert all(sample.num_generated == target for sample, target in targets.items())


def test_finished_samples_leave_the_others_alone() -> None:
    simulator = Simulator(num_blocks=32)
    group = simulator.add(prompt_len=6, lengths=[9, 9, 9])
    simulator.step()
    simulator.step()
    held = simulator.scheduler.allocator.num_used
    simulator.scheduler.finish([group.samples[1]])
    simulator.scheduler.check_integrity()
    assert simulator.scheduler.running == [group.samples[0], group.samples[2]]
    assert simulator.scheduler.allocator.num_used == held - 1
    assert group.samples[1].blocks == []


@pytest.mark.parametrize("steps", range(8))
def test_aborted_group_frees_its_blocks_in_every_state(steps: int) -> None:
    simulator = Simulator(num_blocks=14, max_num_seqs=3, max_batch_tokens=6)
    first = simulator.add(prompt_len=9, lengths=[20, 20])
    second = simulator.add(prompt_len=5, lengths=[20, 20])
    for _ in range(steps):
        simulator.step()
    scheduler = simulator.scheduler
    for group in (second, first):
        scheduler.abort(group)
        scheduler.check_integrity()
        assert not any(sample.prefix is group for sample in scheduler.running)
        assert group not in scheduler.waiting
        scheduler.abort(group)
    assert scheduler.allocator.num_used == 0
    assert not scheduler.unfinished


def test_ownership_error_is_found() -> None:
    simulator = Simulator(num_blocks=8)
    simulator.add(prompt_len=9, lengths=[4, 4])
    simulator.step()
    simulator.step()
    simulator.scheduler.running[0].blocks.pop()
    with pytest.raises(AssertionError, match="owners"):
        simulator.scheduler.check_integrity()
