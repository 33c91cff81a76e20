"""The host half of decoding: a stretch of steps in which every running sample takes one token a step.

The scheduler starts a run when only decoding is left to do and takes over again when a run cannot go on: no free block
(someone must be preempted), or waiting work that may be admitted. In between no Python object is touched per row and
step: positions, block tables and results live in arrays, indexed by a *slot* that a sample keeps through the run.

Steps are launched before the tokens of the step before are read. Ends by length are known in advance. A sample that
drew an EOS is noticed ``look_ahead`` steps later; what it drew since is discarded, and the block it may have taken for
it is freed with the others. Work on one stream is ordered, so a freed block may be handed on at once.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from qerl.kernels.decode_rows import fields
from qerl.rollout.decoder import Decoder, DrawOrder, can_admit, check_finite
from qerl.rollout.drawn import DrawnTokens
from qerl.rollout.kv_cache import NULL_BLOCK, KVCache
from qerl.rollout.scheduler import Prefix, Sample, ScheduledStep, Scheduler
from qerl.rollout.speculation import Speculation

# Tokens of a sample kept in arrays before they move into its lists.
_HISTORY = 64
# A call refills freed slots once this share of the batch is free: planning costs a good part of a decode step.
_REFILL_SHARE = 64


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step in flight: the slots of its rows and the positions of their input tokens."""

    turn: int
    slots: np.ndarray
    positions: np.ndarray


class DecodeRun:
    """Decodes over ``scheduler``'s running samples; mutates them, its block tables and ``kv``.

    ``enter`` with a step for which :func:`can_decode` holds, then ``launch`` and ``collect``, and ``leave`` once
    nothing is in flight. ``eager_refill``: waiting work takes the first slot that is freed, as someone waits for it.
    ``speculation``: the run ends when drafts are worth trying.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        scheduler: Scheduler,
        *,
        eager_refill: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.decoder = decoder
        self.speculation = speculation
        self.eager_refill = eager_refill
        self.kv = kv
        self.scheduler = scheduler
        self.active = False
        self.interrupted = False
        rows, width = decoder.buffers.table.shape
        slots = rows - 1
        self._table = np.full((rows, width), NULL_BLOCK, dtype=np.int32)
        self._samples: list[Sample] = []
        self._order = np.zeros(0, dtype=np.int64)
        self._token, self._position, self._end, self._room, self._last_row, self._fill, self._kind = (
            np.zeros(slots, dtype=np.int64) for _ in range(7)
        )
        self._keys = np.zeros((2, slots), dtype=np.int64)
        self._live = np.zeros(slots, dtype=bool)
        self._history = np.zeros((3, slots, _HISTORY))
        self._draws = DrawOrder.of([])
        self._flying: deque[_Launch] = deque()
        self._turn = 0
        self._freed = 0
        self._refill_at = 1

    @property
    def in_flight(self) -> int:
        """Steps whose tokens were not read yet."""
        return len(self._flying)

    @property
    def look_ahead(self) -> int:
        """Steps to launch before the oldest one's tokens are read."""
        return self.decoder.look_ahead

    def enter(self, step: ScheduledStep) -> None:
        """Take over the samples of ``step``, whose blocks are reserved and whose copies are made."""
        self._draws = DrawOrder.of(step.chunks)
        chunks = self._draws.chunks
        samples: list[Sample] = [chunk.owner for chunk in chunks]
        count = len(samples)
        self.active, self.interrupted = True, False
        self._samples = samples
        self._order = np.arange(count)
        self._table[:count] = NULL_BLOCK
        size = self.kv.block_size
        for slot, sample in enumerate(samples):
            self._table[slot, : len(sample.blocks)] = sample.blocks
        self._position[:count] = [chunk.start for chunk in chunks]
        self._kind[:count] = self._draws.kinds
        self._token[:count] = [sample.token_ids[-1] for sample in samples]
        self._end[:count] = [len(s.prefix.token_ids) + s.prefix.sampling.max_tokens for s in samples]
        self._room[:count] = [len(sample.blocks) * size for sample in samples]
        self._keys[:, :count] = np.array([sample.key for sample in samples], dtype=np.int64).T
        self._last_row[:count] = -1
        self._fill[:count] = 0
        self._live[:count] = True
        self._freed, self._refill_at = 0, 1 if self.eager_refill else max(1, count // _REFILL_SHARE)
        self.decoder.buffers.upload_table(self._table)

    def launch(self) -> int:
        """Start the next step; returns its number of rows, 0 if the run has to end first."""
        order = self._order
        count = len(order)
        if count == 0 or self._has_to_leave():
            return 0
        positions = self._position[order]
        cells = self._grow(order, positions)
        if cells is None:
            return 0
        decoder = self.decoder
        size = decoder.size_of(count)
        self._stage(order, positions, size, cells)
        decoder.buffers.upload(self._turn, cells.shape[1])
        groups = self._draws.groups(self._kind[order])
        decoder.run(self.kv, size, int(positions.max()) + 1, groups, drafts=False)
        decoder.buffers.send_back(self._turn)
        self._flying.append(_Launch(self._turn, order, positions))
        self._turn += 1
        if self.speculation is not None:
            self.speculation.count_plain_step()
        self._last_row[order] = np.arange(count)
        self._position[order] += 1
        self._retire(order[positions + 2 >= self._end[order]])
        return count

    def collect(self) -> DrawnTokens:
        """Wait for the oldest step in flight, and end the samples that drew their last token in it.

        Raises:
            NonFiniteLogitsError: a row had NaN logits.
        """
        launch = self._flying.popleft()
        slots, positions = launch.slots, launch.positions
        values = self.decoder.buffers.read(launch.turn)[:, : len(slots)]
        live = self._live[slots]
        if not live.all():
            slots, positions, values = slots[live], positions[live], values[:, live]
        check_finite(values)
        self._history[:, slots, self._fill[slots]] = values
        self._fill[slots] += 1
        token_ids = values[fields.TOKEN_ID].astype(np.int64).tolist()
        samples = [self._samples[slot] for slot in slots.tolist()]
        stopped = [row for row, token in enumerate(token_ids) if token in samples[row].prefix.stop_ids]
        at_limit = np.flatnonzero(positions + 2 >= self._end[slots])
        for row in at_limit.tolist():
            samples[row].finish_reason = "length"
        for row in stopped:
            samples[row].finish_reason = "stop"
        ended = slots[np.union1d(stopped, at_limit).astype(np.int64)] if stopped or len(at_limit) else slots[:0]
        self._end_samples(ended)
        if len(slots) and self._fill[slots].max() == _HISTORY:
            self._flush(slots)
        return DrawnTokens(
            samples, token_ids, values[fields.LOGPROB].tolist(), values[fields.TEMPERATURE_LOGPROB].tolist()
        )

    def abort(self, prefix: Prefix) -> None:
        """Drop the samples of a group; what they have in flight is discarded."""
        for slot in np.flatnonzero(self._live).tolist():
            if self._samples[slot].prefix is prefix:
                self._live[slot] = False
        self._order = self._order[self._live[self._order]]
        self._freed += 1
        self._forget_flying_if_dead()

    def leave(self) -> None:
        """Hand the samples back to the scheduler. Nothing may be in flight."""
        assert not self._flying, f"{len(self._flying)} steps are still in flight"
        self._flush(self._order)
        for slot in self._order.tolist():
            sample = self._samples[slot]
            sample.num_computed = int(self._position[slot])
            assert len(sample.token_ids) == sample.num_computed + 1, f"sample {sample.order} lost a token"
        self._live[:] = False
        self._samples = []
        self._order = self._order[:0]
        self.active = False

    def _has_to_leave(self) -> bool:
        """True if the scheduler could admit waiting work now, or if drafts are to be tried."""
        if self.speculation is not None and self.speculation.wanted(len(self._order)):
            return True
        return can_admit(self.scheduler, arrived=self.interrupted, freed=self._freed >= self._refill_at)

    def _grow(self, order: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Give a block to every row that has filled its last one: (cell of the table, block) int64 [2, C], or None if
        there are too few."""
        full = order[positions >= self._room[order]]
        allocator = self.scheduler.allocator
        if len(full) > allocator.num_free:
            return None
        blocks = allocator.allocate(len(full))
        for slot, block in zip(full.tolist(), blocks, strict=True):
            self._samples[slot].blocks.append(block)
        columns = self._room[full] // self.kv.block_size
        self._table[full, columns] = blocks
        self._room[full] += self.kv.block_size
        return np.stack((full * self._table.shape[1] + columns, np.array(blocks, dtype=np.int64)))

    def _stage(self, order: np.ndarray, positions: np.ndarray, size: int, cells: np.ndarray) -> None:
        """Write the inputs of the step into the staging matrix of this turn."""
        count, block_size = len(order), self.kv.block_size
        stage = self.decoder.staging(self._turn, count, size)
        stage[fields.SOURCE, :count] = self._last_row[order]
        stage[fields.TOKEN, :count] = self._token[order]
        stage[fields.POSITION, :count] = positions
        blocks = self._table[order, positions // block_size].astype(np.int64)
        stage[fields.SLOT, :count] = blocks * block_size + positions % block_size
        stage[fields.KEY_LOW : fields.KEY_HIGH + 1, :count] = self._keys[:, order]
        stage[fields.TABLE_ROW, :count] = order
        stage[fields.CELL_INDEX :, : cells.shape[1]] = cells

    def _retire(self, slots: np.ndarray) -> None:
        """Take samples out of the batch and free their blocks; their last tokens may still be in flight."""
        if len(slots) == 0:
            return
        leaving = np.zeros(len(self._live), dtype=bool)
        leaving[slots] = True
        self._order = self._order[~leaving[self._order]]
        self._freed += len(slots)
        self.scheduler.finish([self._samples[slot] for slot in slots.tolist()])

    def _end_samples(self, slots: np.ndarray) -> None:
        """Complete the samples whose last token was read."""
        if len(slots) == 0:
            return
        self._flush(slots)
        self._live[slots] = False
        self._retire(slots[np.isin(slots, self._order)])
        self._forget_flying_if_dead()

    def _forget_flying_if_dead(self) -> None:
        """Do not wait for steps that nobody wants anything from."""
        if not self._live.any():
            self._flying.clear()

    def _flush(self, slots: np.ndarray) -> None:
        """Move tokens and log-probs from the arrays into the samples' lists."""
        for slot, count in zip(slots.tolist(), self._fill[slots].tolist(), strict=True):
            sample, past = self._samples[slot], self._history[:, slot, :count]
            sample.token_ids.extend(past[fields.TOKEN_ID].astype(np.int64).tolist())
            sample.logprobs.extend(past[fields.LOGPROB].tolist())
            sample.temperature_logprobs.extend(past[fields.TEMPERATURE_LOGPROB].tolist())
        self._fill[slots] = 0


def can_decode(step: ScheduledStep, scheduler: Scheduler) -> bool:
    """True when ``step`` gives every running sample its next token and does nothing else."""
    return len(step.chunks) == len(scheduler.running) and all(
        chunk.count == 1 and chunk.samples_from_last and isinstance(chunk.owner, Sample) for chunk in step.chunks
    )
