"""Continuous batching: which tokens run in the next forward pass, and where their K/V goes.

A *group* is a prompt with its n samples. Its prompt is prefilled once (in chunks if the token budget is
smaller); the first token of every sample is drawn from that one row of logits; then each sample forks the
prompt's blocks by reference and decodes on its own. The last, partly filled prompt block is copied by the
first sample that writes to it while others still hold it (copy-on-write); whoever holds it last writes in
place.

Order is strictly first come, first served over (group, sample): every running sample precedes every waiting
one. When blocks run out, prompts that only wait (held for samples not yet running) are dropped first, then
the last running sample is preempted: its blocks are freed, its tokens kept, and it recomputes them when
there is room again. Sampling is keyed by position, so nothing about the result changes. The first running
sample can always evict all others, so a request that fits the empty cache always finishes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from qerl.rollout.blocks import BlockAllocator
from qerl.rollout.core import FinishReason, SamplingParams
from qerl.rollout.kv_cache import blocks_for_tokens


@dataclass(slots=True, eq=False)
class Prefix:
    """The prompt of a group: its samples, those that wait, and the blocks held for these.

    ``sampling`` and ``stop_ids`` (every token that ends a sample) are common to its samples.
    """

    index: int
    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    samples: list["Sample"] = field(default_factory=list)
    waiting: deque["Sample"] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def resident(self) -> bool:
        """True when the K/V of the whole prompt is in the cache and held by the group."""
        return self.num_computed == len(self.token_ids)

    @property
    def needs_first_tokens(self) -> bool:
        """True until the first token of every sample has been drawn."""
        return not self.samples[0].num_generated


@dataclass(slots=True, eq=False)
class Sample:
    """One completion in the making. ``num_computed`` of its ``token_ids`` (prompt included) are in the cache."""

    prefix: Prefix
    sample_index: int
    key: tuple[int, int]
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    temperature_logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.logprobs)

    def append(self, token: int, logprob: float, temperature_logprob: float) -> None:
        """Take a sampled token; sets ``finish_reason`` if it is the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.temperature_logprobs.append(temperature_logprob)
        if token in self.prefix.stop_ids:
            self.finish_reason = "stop"
        elif self.num_generated == self.prefix.sampling.max_tokens:
            self.finish_reason = "length"

    @property
    def order(self) -> tuple[int, int]:
        """Arrival order: (group, sample)."""
        return self.prefix.index, self.sample_index


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of ``owner`` from ``start`` on. ``samples_from_last``: its last row yields tokens."""

    owner: Prefix | Sample
    start: int
    count: int
    samples_from_last: bool

    @property
    def end(self) -> int:
        """Context length of the owner after this chunk."""
        return self.start + self.count

    @property
    def drawers(self) -> list[Sample]:
        """The samples that draw from the last row: the whole group for a prompt, else the sample itself."""
        return self.owner.samples if isinstance(self.owner, Prefix) else [self.owner]


@dataclass(slots=True)
class ScheduledStep:
    """The work of one forward pass. ``copies`` (source block, destination block) must be done before it.

    ``budget`` bounds the prompt tokens and the recomputed ones. The next token of a running sample comes on top: if it
    took a place, every prompt behind it would be cut, and its rest cost a pass of its own.
    """

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, owner: Prefix | Sample, count: int, *, wants_token: bool) -> None:
        """Append the next ``count`` tokens of ``owner``; a token is drawn only where its known tokens end."""
        last = owner.num_computed + count == len(owner.token_ids)
        decodes = isinstance(owner, Sample) and last and count == 1
        self.chunks.append(Chunk(owner, owner.num_computed, count, wants_token and last))
        self.budget -= 0 if decodes else count


class Scheduler:
    """Owns the queues and every block table. ``schedule`` and ``advance`` alternate while ``unfinished``."""

    def __init__(self, allocator: BlockAllocator, block_size: int, max_num_seqs: int, max_batch_tokens: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.running: list[Sample] = []
        self.waiting: deque[Prefix] = deque()
        self.preemptions = 0
        self.peak_running = 0
        self._holding: dict[int, Prefix] = {}

    @property
    def unfinished(self) -> bool:
        """True while a sample runs or waits."""
        return bool(self.running or self.waiting)

    def add(self, prefix: Prefix) -> None:
        """Queue a group that fits the empty cache; groups arrive in the order of their indices."""
        prefix.waiting.extend(prefix.samples)
        self.waiting.append(prefix)

    def schedule(self) -> ScheduledStep:
        """Plan the next forward pass and reserve its blocks. Never empty while ``unfinished``."""
        step = ScheduledStep(self.max_batch_tokens)
        self._schedule_running(step)
        self._schedule_waiting(step)
        assert step.chunks, "nothing could be scheduled although samples are unfinished"
        self.peak_running = max(self.peak_running, len(self.running))
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Record that ``step`` was computed and its tokens appended; frees what finished samples hold."""
        for chunk in step.chunks:
            chunk.owner.num_computed = chunk.end
        for sample in self.running:
            if sample.finish_reason is not None:
                self._release(sample)
        self.running = [sample for sample in self.running if sample.finish_reason is None]
        for chunk in step.chunks:
            # A sample can end with its very first token, before it ever ran.
            if isinstance(chunk.owner, Prefix) and chunk.samples_from_last:
                prefix = chunk.owner
                prefix.waiting = deque(s for s in prefix.waiting if s.finish_reason is None)
                self._drop_if_unused(prefix)

    def finish(self, samples: Iterable[Sample]) -> None:
        """Take running samples out and free their blocks."""
        done = {id(sample) for sample in samples}
        for sample in self.running:
            if id(sample) in done:
                self._release(sample)
        self.running = [sample for sample in self.running if id(sample) not in done]

    def abort(self, prefix: Prefix) -> None:
        """Forget a group between two steps and free its blocks; one that is not queued is left alone."""
        for sample in self.running:
            if sample.prefix is prefix:
                self._release(sample)
        self.running = [sample for sample in self.running if sample.prefix is not prefix]
        if prefix in self.waiting:
            prefix.waiting.clear()
            self._drop_if_unused(prefix)

    def _schedule_running(self, step: ScheduledStep) -> None:
        """Give every running sample its next token (or the tokens it recomputes), evicting from the back."""
        position = 0
        while position < len(self.running):
            sample = self.running[position]
            position += 1
            missing = len(sample.token_ids) - sample.num_computed
            count = missing if missing == 1 else min(missing, step.budget)
            if count == 0:
                continue  # its turn comes with the next pass
            if not self._reserve_evicting(sample, count, step):
                return
            step.add(sample, count, wants_token=True)

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        """Admit waiting samples of a resident prompt and prefill the prompts of the next ones, in order."""
        while self.waiting and self.waiting[0].resident:
            head = self.waiting[0]
            self._admit(head, step)
            if head.waiting:
                return
        # Slots of samples that start as soon as the prompts before them are computed.
        promised = 0
        for prefix in self.waiting:
            free_seqs = self.max_num_seqs - len(self.running) - promised
            if step.budget == 0 or free_seqs <= 0:
                return
            assert not prefix.resident, f"prompt {prefix.index} is held behind one that is not"
            if not self._prefill(prefix, step, promised):
                return
            promised += len(prefix.waiting)

    def _admit(self, prefix: Prefix, step: ScheduledStep) -> None:
        """Start as many waiting samples of a resident group as slots, budget and blocks allow."""
        while prefix.waiting and step.budget > 0 and len(self.running) < self.max_num_seqs:
            sample = prefix.waiting[0]
            count = min(len(sample.token_ids) - len(prefix.token_ids), step.budget)
            end = len(prefix.token_ids) + count
            needed = blocks_for_tokens(end, self.block_size) - len(prefix.token_ids) // self.block_size
            if self.running and needed + self._headroom() > self.allocator.num_free:
                return
            prefix.waiting.popleft()
            sample.blocks = self.allocator.share(prefix.blocks)
            sample.num_computed = prefix.num_computed
            self.running.append(sample)
            self._drop_if_unused(prefix)
            # With others running the room was checked above; a lone sample may evict every held prompt, its
            # own too.
            reserved = self._reserve_evicting(sample, count, step)
            assert reserved, f"sample {sample.order} was admitted without room for it"
            step.add(sample, count, wants_token=True)

    def _prefill(self, prefix: Prefix, step: ScheduledStep, promised: int) -> bool:
        """Schedule the next chunk of a prompt; False when there is no room for it now."""
        count = min(len(prefix.token_ids) - prefix.num_computed, step.budget)
        needed = self._blocks_needed(prefix, count)
        if not self.running and not step.chunks:
            # Only this group and those behind it hold blocks, and it fits the empty cache: its own stay.
            while needed > self.allocator.num_free:
                self._drop(self._holding[max(self._holding)])
        elif needed + self._headroom() + promised > self.allocator.num_free:
            return False
        self._holding[prefix.index] = prefix
        self._reserve(prefix, count, step)
        step.add(prefix, count, wants_token=prefix.needs_first_tokens)
        return True

    def _headroom(self) -> int:
        """Blocks left free for running samples to grow into, so that admission does not preempt at once."""
        return len(self.running)

    def _blocks_needed(self, owner: Prefix | Sample, count: int) -> int:
        """New blocks for the next ``count`` tokens, the copy of a shared last block included."""
        end = owner.num_computed + count
        copied = 1 if self._writes_shared_block(owner) else 0
        return blocks_for_tokens(end, self.block_size) - len(owner.blocks) + copied

    def _writes_shared_block(self, owner: Prefix | Sample) -> bool:
        if owner.num_computed % self.block_size == 0:
            return False
        return self.allocator.ref_count(owner.blocks[owner.num_computed // self.block_size]) > 1

    def _reserve(self, owner: Prefix | Sample, count: int, step: ScheduledStep) -> None:
        """Allocate for the next ``count`` tokens; a shared block that they write to is replaced by a copy."""
        taken = self.allocator.allocate(self._blocks_needed(owner, count))
        if self._writes_shared_block(owner):
            at = owner.num_computed // self.block_size
            copy = taken.pop()
            step.copies.append((owner.blocks[at], copy))
            self.allocator.free([owner.blocks[at]])
            owner.blocks[at] = copy
        owner.blocks.extend(taken)

    def _reserve_evicting(self, sample: Sample, count: int, step: ScheduledStep) -> bool:
        """Reserve for a running sample, dropping held prompts and then preempting from the back.

        False when ``sample`` itself was the last one and is preempted. Needs are counted anew after each
        eviction: dropping a held prompt may end the sharing that made a copy necessary.
        """
        while self._blocks_needed(sample, count) > self.allocator.num_free:
            if self._drop_held_for(sample):
                continue
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sample:
                return False
        self._reserve(sample, count, step)
        return True

    def _preempt(self, sample: Sample) -> None:
        """Put ``sample`` back to the front of the queue without its K/V."""
        prefix = sample.prefix
        full_blocks = len(prefix.token_ids) // self.block_size
        if not prefix.blocks and full_blocks:
            # Siblings often still hold these, so keeping them is free; otherwise they are the next to be
            # evicted.
            prefix.blocks = self.allocator.share(sample.blocks[:full_blocks])
            prefix.num_computed = full_blocks * self.block_size
            self._holding[prefix.index] = prefix
        self._release(sample)
        if not prefix.waiting:
            self.waiting.appendleft(prefix)
        prefix.waiting.appendleft(sample)
        self.preemptions += 1

    def _release(self, sample: Sample) -> None:
        self.allocator.free(sample.blocks)
        sample.blocks = []
        sample.num_computed = 0

    def _drop(self, prefix: Prefix) -> None:
        """Give up the group's hold on its prompt; samples that run keep their own references."""
        self.allocator.free(prefix.blocks)
        prefix.blocks = []
        prefix.num_computed = 0
        self._holding.pop(prefix.index, None)

    def _drop_held_for(self, sample: Sample) -> bool:
        """Drop the last held prompt whose going helps ``sample``; False if there is none.

        It helps when a block becomes free or ``sample`` no longer has to copy one. A prompt that running samples
        share all of costs nothing to keep.
        """
        for index in sorted(self._holding, reverse=True):
            prefix = self._holding[index]
            frees = any(self.allocator.ref_count(block) == 1 for block in prefix.blocks)
            if frees or (prefix is sample.prefix and self._writes_shared_block(sample)):
                self._drop(prefix)
                return True
        return False

    def _drop_if_unused(self, prefix: Prefix) -> None:
        """Once no sample of the group waits, leave the queue and let the running samples own the prompt."""
        if not prefix.waiting:
            self._drop(prefix)
            self.waiting.remove(prefix)

    def check_integrity(self) -> None:
        """Check block ownership, queue order and sizes; meant for tests, cost is linear in blocks and
        samples.

        Raises:
            AssertionError: an invariant of the allocator or of the queues is broken.
        """
        self.allocator.check_integrity(self._tables())
        held = {prefix.index for prefix in self.waiting if prefix.blocks}
        assert held == set(self._holding), f"held prompts {held} but recorded {set(self._holding)}"
        orders = [sample.order for sample in self.running]
        orders += [sample.order for prefix in self.waiting for sample in prefix.waiting]
        assert orders == sorted(set(orders)), "running and waiting samples are out of order"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} sequences run"
        for owner in (*self.running, *self.waiting):
            room = len(owner.blocks) * self.block_size
            assert owner.num_computed <= min(room, len(owner.token_ids)), f"{owner.num_computed} in {room}"
        for prefix in self.waiting:
            assert not any(s.blocks or s.num_computed for s in prefix.waiting), "a waiting sample holds blocks"

    def _tables(self) -> Iterable[list[int]]:
        for owner in (*self.running, *self.waiting):
            yield owner.blocks
