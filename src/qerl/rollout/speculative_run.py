"""Decoding with drafts: several tokens of a sample in one step, each the one that plain decoding would have drawn.

The sampler is a function: the key of the sample, the position and the logits there decide the token. A draft is fed as
further rows of an ordinary decode step: row j of a sample has position p + j, its own KV slot, the same block table,
and as its input the j-th guess. All rows write their keys and values in every layer before attention reads, so row j
sees the guesses before it, and draws what would be drawn behind them. As long as a row drew what the next one was fed,
that next row is what plain decoding would have run, and its token counts; the first row that drew something else gives
the last token of the step. So nothing is rejected by chance and no distribution is corrected: both ways of decoding are
coupled exactly, and a guess is right with the probability that the policy gives it. Log-probs are those of the rows
that counted. (A step of more rows may be served by other kernels and then rounds otherwise, as any other batch may.)

What refuted rows wrote lies behind the end of the sample: nothing reads it, and later tokens are written over it. The
blocks it took are given back at once, so that between two steps the allocator knows nothing of drafts.

Guesses need the tokens of the step before on the host, so no step is launched ahead; a step must bring more than that
costs (see ``speculation.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qerl.kernels.decode_rows import fields
from qerl.rollout.decoder import Decoder, DrawOrder, can_admit, check_finite
from qerl.rollout.drafts import Draft
from qerl.rollout.drawn import DrawnTokens
from qerl.rollout.kv_cache import NULL_BLOCK, KVCache, blocks_for_tokens
from qerl.rollout.scheduler import Prefix, Sample, ScheduledStep, Scheduler
from qerl.rollout.speculation import Speculation


@dataclass(frozen=True, slots=True)
class _Seat:
    """A running sample, its row of the block tables, and the kind of its draws (see ``DrawOrder``)."""

    slot: int
    sample: Sample
    kind: int


class SpeculativeRun:
    """Decodes over ``scheduler``'s running samples, which are few; mutates them, their block tables and ``kv``.

    Used as :class:`~qerl.rollout.decode_run.DecodeRun` is. A sample's lists are up to date after every ``collect``.
    """

    look_ahead = 0

    def __init__(self, decoder: Decoder, kv: KVCache, scheduler: Scheduler, speculation: Speculation) -> None:
        self.decoder = decoder
        self.kv = kv
        self.scheduler = scheduler
        self.speculation = speculation
        self.active = False
        self.interrupted = False
        self._draws = DrawOrder.of([])
        self._seats: list[_Seat] = []
        self._flying: list[tuple[_Seat, Draft]] = []
        self._turn = 0
        self._freed = False

    @property
    def in_flight(self) -> int:
        """Steps whose tokens were not read yet."""
        return int(bool(self._flying))

    def enter(self, step: ScheduledStep) -> None:
        """Take over the samples of ``step``, whose blocks are reserved and whose copies are made."""
        self._draws = DrawOrder.of(step.chunks)
        samples: list[Sample] = [chunk.owner for chunk in self._draws.chunks]
        self.active, self.interrupted, self._freed = True, False, False
        kinds = self._draws.kinds.tolist()
        self._seats = [_Seat(slot, sample, kinds[slot]) for slot, sample in enumerate(samples)]
        buffers = self.decoder.buffers
        table = np.full(tuple(buffers.table.shape), NULL_BLOCK, dtype=np.int32)
        for slot, sample in enumerate(samples):
            table[slot, : len(sample.blocks)] = sample.blocks
        buffers.upload_table(table)
        self.speculation.follow(samples)

    def launch(self) -> int:
        """Start the next step; returns its number of rows, 0 if the run has to end first."""
        if not self._seats or self._has_to_leave():
            return 0
        cells = self._grow()
        if cells is None:
            return 0
        drafts = self._reserve(self.speculation.plan([seat.sample for seat in self._seats]), cells)
        self._flying = list(zip(self._seats, drafts, strict=True))
        rows = sum(1 + len(draft.token_ids) for draft in drafts)
        decoder = self.decoder
        size = decoder.size_of(rows)
        self._stage(rows, size, cells)
        decoder.buffers.upload(self._turn, len(cells))
        longest = max(len(seat.sample.token_ids) + len(draft.token_ids) for seat, draft in self._flying)
        kinds = [seat.kind for seat, draft in self._flying for _ in range(1 + len(draft.token_ids))]
        groups = self._draws.groups(np.array(kinds, dtype=np.int64))
        decoder.run(self.kv, size, longest, groups, drafts=rows > len(drafts))
        decoder.buffers.send_back(self._turn)
        return rows

    def collect(self) -> DrawnTokens:
        """Wait for the step in flight, append what it drew to the samples, and end those that are done.

        Raises:
            NonFiniteLogitsError: a row had NaN logits (one of a refuted draft too: its keys and values are NaN then).
        """
        flying, self._flying = self._flying, []
        rows = sum(1 + len(draft.token_ids) for _, draft in flying)
        values = self.decoder.buffers.read(self._turn)[:, :rows]
        self._turn += 1
        check_finite(values)
        columns = [*zip(*values.tolist(), strict=True)]
        drawn = DrawnTokens([], [], [], [])
        row = 0
        for seat, draft in flying:
            end = row + 1 + len(draft.token_ids)
            self._take(seat.sample, draft, columns[row:end], drawn)
            row = end
        self.speculation.count_step(len(flying), rows, len(drawn.samples))
        self._retire()
        return drawn

    def abort(self, prefix: Prefix) -> None:
        """Drop the samples of a group (between steps, when nothing is in flight)."""
        self._seats = [seat for seat in self._seats if seat.sample.prefix is not prefix]
        self._freed = True

    def leave(self) -> None:
        """Hand the samples back to the scheduler. Nothing may be in flight."""
        assert not self._flying, f"{len(self._flying)} samples are still in flight"
        self._seats = []
        self.active = False

    def _has_to_leave(self) -> bool:
        """True if the scheduler could admit waiting work now, or if drafts do not pay."""
        if not self.speculation.wanted(len(self._seats)):
            return True
        return can_admit(self.scheduler, arrived=self.interrupted, freed=self._freed)

    def _grow(self) -> list[tuple[int, int]] | None:
        """Give a block to every sample whose next token needs one: (cell of the tables, block) each, or None if there
        are too few."""
        full = [
            seat for seat in self._seats if len(seat.sample.token_ids) > len(seat.sample.blocks) * self.kv.block_size
        ]
        if len(full) > self.scheduler.allocator.num_free:
            return None
        return [cell for seat in full for cell in self._give(seat, 1)]

    def _reserve(self, drafts: Sequence[Draft], cells: list[tuple[int, int]]) -> list[Draft]:
        """Blocks for the drafts, which are cut where there are none; the new cells are added to ``cells``."""
        size, fitting = self.kv.block_size, []
        for seat, draft in zip(self._seats, drafts, strict=True):
            known, held = len(seat.sample.token_ids), len(seat.sample.blocks)
            most = (held + self.scheduler.allocator.num_free) * size - known
            draft = draft.first(most) if len(draft.token_ids) > most else draft
            wanted = blocks_for_tokens(known + len(draft.token_ids), size) - held
            cells += self._give(seat, wanted)
            fitting.append(draft)
        return fitting

    def _give(self, seat: _Seat, count: int) -> list[tuple[int, int]]:
        """Append ``count`` blocks to the seat's sample; their cells of the block tables."""
        width, blocks = self.decoder.buffers.table.shape[1], seat.sample.blocks
        first = seat.slot * width + len(blocks)
        taken = self.scheduler.allocator.allocate(count)
        blocks += taken
        return list(enumerate(taken, start=first))

    def _stage(self, rows: int, size: int, cells: list[tuple[int, int]]) -> None:
        """Write the inputs of the step into the staging matrix of this turn."""
        block_size = self.kv.block_size
        inputs: list[tuple[int, ...]] = []
        for seat, draft in self._flying:
            sample = seat.sample
            first = len(sample.token_ids) - 1
            for position, token in enumerate((sample.token_ids[-1], *draft.token_ids), start=first):
                slot = sample.blocks[position // block_size] * block_size + position % block_size
                inputs.append((-1, token, position, slot, *sample.key, seat.slot))
        stage = self.decoder.staging(self._turn, rows, size)
        stage[: fields.CELL_INDEX, :rows] = np.array(inputs, dtype=np.int64).T
        if cells:
            stage[fields.CELL_INDEX :, : len(cells)] = np.array(cells, dtype=np.int64).T

    def _take(
        self, sample: Sample, draft: Draft, rows: Sequence[tuple[float, float, float]], drawn: DrawnTokens
    ) -> None:
        """Append the tokens of a sample's rows that count to it and to ``drawn``; give back the blocks of the rest."""
        refuted = False
        guesses = [*draft.token_ids, None]
        taken = 0
        for (token, logprob, temperature_logprob), guess in zip(rows, guesses, strict=True):
            token_id = int(token)
            sample.append(token_id, logprob, temperature_logprob)
            taken += 1
            drawn.samples.append(sample)
            drawn.token_ids.append(token_id)
            drawn.logprobs.append(logprob)
            drawn.temperature_logprobs.append(temperature_logprob)
            if sample.finish_reason is not None or guess is None:
                break
            if token_id != guess:
                refuted = True
                break
        sample.num_computed = len(sample.token_ids) - 1
        kept = blocks_for_tokens(sample.num_computed, self.kv.block_size)
        self.scheduler.allocator.free(reversed(sample.blocks[kept:]))
        del sample.blocks[kept:]
        if draft.token_ids:
            self.speculation.observe(sample, draft, taken - 1, refuted=refuted)
        self.speculation.extend(sample)

    def _retire(self) -> None:
        """Take the samples that are done out of the batch and free their blocks."""
        done = [seat.sample for seat in self._seats if seat.sample.finish_reason is not None]
        if done:
            self._freed = True
            self._seats = [seat for seat in self._seats if seat.sample.finish_reason is None]
            self.scheduler.finish(done)
