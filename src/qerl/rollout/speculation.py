"""Which drafts are worth their rows, and when drafting is worth anything: decided from counts, never from clocks.

A step of more rows takes longer and may round otherwise, so a choice that a clock made would make runs differ. The cost
of a step is therefore a table by device (a measured one, interpolated), and the chance that a draft is right is counted
in this run, by the length of its match. A step takes the drafts that bring the most tokens for its cost, often none.
Where steps with drafts brought less than plain steps would have, there is a pause; the next one is twice as long, and
half as long after steps that paid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qerl.rollout.config import EngineConfig
from qerl.rollout.drafts import MAX_MATCH, Draft, DraftIndex
from qerl.rollout.history import CompletionHistory
from qerl.rollout.scheduler import Prefix, Sample

# (rows, time of a step of so many rows over that of one row); beyond the last two points the line goes on.
# CUDA: 7B, NVFP4, LoRA, H200: 2.03, 2.27, 3.14, 4.13 ms at 1, 8, 32, 64 rows (docs/log.md).
# CPU: SmolLM2-135M in fp32, one thread: 67, 110, 117, 155, 212 ms (102 at 4 rows).
_CUDA_COST = ((1, 1.0), (8, 1.12), (32, 1.55), (64, 2.03))
_CPU_COST = ((1, 1.0), (2, 1.55), (8, 1.7), (16, 2.25), (32, 3.2))
# Time of the host that a step with drafts adds, fixed and for each sample, in the same unit: 85 and 30 microseconds
# were measured with 4 drafts. On CUDA the device waits meanwhile (as drafts need the tokens of the step before, nothing
# is launched ahead), over the 2.03 ms of 7B; what else the wait costs there was not measured. A tiny model's step is
# shorter, so that drafts are tried there more often than they pay.
_CUDA_HOST, _CPU_HOST = (0.05, 0.015), (0.001, 0.0005)
# Chance that a guess is right before any was tried, by length of the match (from this one on), worth so many trials.
# Found with SmolLM2-135M on GSM8K at T = 1, rounded (docs/log.md); a better model is more predictable.
_PRIORS = ((1, 0.25), (2, 0.35), (3, 0.5), (5, 0.6), (8, 0.6))
_PRIOR_TRIALS = 8
# Counts are halved there, so that what is long ago weighs less.
_MAX_TRIALS = 512
# Drafting pays from this much more tokens for the cost on: costs are not known better than that.
_MARGIN = 1.05
# Tokens that plain steps would have drawn between two verdicts; plain steps in the first pause and in the longest.
_WINDOW = 64
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
_NO_STEPS = (0, 0.0, 0, 0.0)
# Keys of all indexes of a run together; those of one group at least.
_MAX_KEYS, _FEWEST_KEYS = 1 << 18, 1 << 12
# Keys for each token that is read at once when drafting begins. A token has up to three, and an index that is full
# drops half of them; and reading takes some 6 microseconds a token, in which no step runs.
_KEYS_A_TOKEN = 6


@dataclass(slots=True)
class _Trials:
    """Drafts that were tried, and those that were right (fractional: both start at a prior and are halved)."""

    tried: float
    right: float

    @property
    def chance(self) -> float:
        """Share of the drafts that was right."""
        return self.right / self.tried

    def count(self, right: bool) -> None:
        """One more was tried."""
        self.tried += 1
        self.right += right
        if self.tried > _MAX_TRIALS:
            self.tried, self.right = self.tried / 2, self.right / 2


class Speculation:
    """Drafts and decisions of one ``generate`` call or session.

    Args:
        config: ``speculative_tokens`` drafts a sample at most, up to ``speculative_max_batch`` running samples.
        cuda: where the steps run.
        size_of: rows of a step -> rows it is padded to.
        history: completions of earlier calls.

    Attributes:
        drafted, accepted: drafts that were fed, and those that gained a token.
        steps: steps that verified drafts.
    """

    def __init__(
        self, config: EngineConfig, cuda: bool, size_of: Callable[[int], int], history: CompletionHistory
    ) -> None:
        self.drafted = self.accepted = self.steps = 0
        self._max_drafts = config.speculative_tokens
        self._max_batch = config.speculative_max_batch
        self._cost_points = _CUDA_COST if cuda else _CPU_COST
        self._host = _CUDA_HOST if cuda else _CPU_HOST
        self._size_of = size_of
        self._history = history
        self._indexes: dict[Prefix, tuple[DraftIndex, int]] = {}
        self._trials: dict[tuple[bool, int], _Trials] = {}
        self._pause, self._next_pause = 0, _FIRST_PAUSE
        # Tokens and cost of the steps since the last verdict, and those of as many plain steps.
        self._window: tuple[float, ...] = _NO_STEPS

    def wanted(self, running: int) -> bool:
        """Whether to try drafts with so many running samples."""
        return 0 < running <= self._max_batch and self._pause == 0

    def count_plain_step(self) -> None:
        """A step ran without drafts: the pause is that much shorter."""
        self._pause = max(0, self._pause - 1)

    def follow(self, samples: Sequence[Sample]) -> None:
        """Read the groups of ``samples``, which run now, up to their last tokens; forget other groups.

        Of long texts only the last tokens are read: those of the samples, as many of each; where there is room for
        more, those of the prompt, and completions of earlier calls.
        """
        groups = dict.fromkeys(sample.prefix for sample in samples)
        self._indexes = {group: entry for group, entry in self._indexes.items() if group in groups}
        max_keys = max(_FEWEST_KEYS, _MAX_KEYS // len(groups))
        for group in groups:
            if group in self._indexes:
                index, first = self._indexes[group]
                index.limit_keys(max_keys)
                numbers = [first + sample.sample_index for sample in group.samples]
                shares = _shares([index.num_unfiled(number) for number in numbers], max_keys // _KEYS_A_TOKEN)
                for number, share in zip(numbers, shares, strict=True):
                    index.extend_by_last(number, share)
            else:
                self._indexes[group] = self._read(group, max_keys)

    def extend(self, sample: Sample) -> None:
        """``sample`` has grown."""
        index, first = self._indexes[sample.prefix]
        index.extend(first + sample.sample_index)

    def plan(self, samples: Sequence[Sample]) -> list[Draft]:
        """The drafts to feed behind the last token of each sample; often none."""
        drafts = [self._propose(sample) for sample in samples]
        # (chance that all drafts of the sample up to this one are right, its number, its sample)
        gains: list[tuple[float, int, int]] = []
        for i, (sample, draft) in enumerate(zip(samples, drafts, strict=True)):
            chance = 1.0
            for number in range(len(draft.token_ids)):
                chance *= self._trials_of(sample, draft.match + number).chance
                gains.append((chance, number + 1, i))
        gains.sort(key=lambda gain: (-gain[0], gain[1], gain[2]))
        chosen = [0] * len(samples)
        for _, number, i in gains[: self._best_count(len(samples), [gain for gain, _, _ in gains])]:
            chosen[i] = number
        return [draft.first(count) for draft, count in zip(drafts, chosen, strict=True)]

    def observe(self, sample: Sample, draft: Draft, gained: int, *, refuted: bool) -> None:
        """``gained`` tokens of a sample's draft were right; ``refuted``: the next one was not."""
        self.drafted += len(draft.token_ids)
        self.accepted += gained
        # Behind a guess that was right the match is longer by one.
        for number in range(gained + refuted):
            self._trials_of(sample, draft.match + number).count(number < gained)

    def count_step(self, samples: int, rows: int, tokens: int) -> None:
        """A step of ``rows`` rows brought ``tokens`` tokens of ``samples`` samples; a verdict on drafting when due."""
        self.steps += rows > samples
        now = (tokens, self._drafting_cost(samples, rows), samples, self._cost(samples))
        drawn, cost, plain_drawn, plain_cost = (sum(pair) for pair in zip(self._window, now, strict=True))
        self._window = (drawn, cost, plain_drawn, plain_cost)
        if plain_drawn < _WINDOW:
            return
        self._window = _NO_STEPS
        if drawn * plain_cost > _MARGIN * plain_drawn * cost:
            # By and by: one window that pays may be luck.
            self._next_pause = max(_FIRST_PAUSE, self._next_pause // 2)
            return
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        # The next try begins without prejudice: what was counted belongs to text of long ago by then.
        self._trials.clear()

    def _read(self, group: Prefix, max_keys: int) -> tuple[DraftIndex, int]:
        """An index of what is known of a group, and the number of its first sample."""
        index, prompt = DraftIndex(max_keys), group.token_ids
        room = max_keys // _KEYS_A_TOKEN
        shares = _shares([len(sample.token_ids) - len(prompt) for sample in group.samples], room)
        room -= sum(shares)
        of_prompt = min(len(prompt), room)
        before = prompt[-MAX_MATCH:]
        # What was written last is added last, as it is to stay longest.
        earlier = self._history.of(prompt, room - of_prompt)
        for completion in earlier:
            index.add(before + completion, len(before))
        index.add(prompt, len(prompt) - of_prompt)
        for sample, share in zip(group.samples, shares, strict=True):
            index.add(sample.token_ids, len(sample.token_ids) - share)
        return index, len(earlier) + 1

    def _propose(self, sample: Sample) -> Draft:
        # The last token that a sample may take is drawn, so it need not be guessed.
        left = sample.prefix.sampling.max_tokens - sample.num_generated - 1
        index, first = self._indexes[sample.prefix]
        return index.propose(first + sample.sample_index, min(self._max_drafts, left))

    def _trials_of(self, sample: Sample, match: int) -> _Trials:
        prior = max(number for number, (length, _) in enumerate(_PRIORS) if length <= match)
        start = _Trials(_PRIOR_TRIALS, _PRIOR_TRIALS * _PRIORS[prior][1])
        return self._trials.setdefault((sample.prefix.sampling.greedy, prior), start)

    def _best_count(self, samples: int, gains: Sequence[float]) -> int:
        """How many of the drafts, the likeliest first, give the most tokens for the cost of the step."""
        best, best_rate, tokens = 0, samples / self._drafting_cost(samples, samples), float(samples)
        for count, gain in enumerate(gains, start=1):
            tokens += gain
            rate = tokens / self._drafting_cost(samples, samples + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _drafting_cost(self, samples: int, rows: int) -> float:
        """Time of a step of a run with drafts, its host's included."""
        fixed, for_each = self._host
        return self._cost(rows) + fixed + for_each * samples

    def _cost(self, rows: int) -> float:
        """Time of a step over that of one row."""
        size, points = self._size_of(rows), self._cost_points
        low, high = next((pair for pair in pairwise(points) if size <= pair[1][0]), points[-2:])
        return low[1] + (size - low[0]) * (high[1] - low[1]) / (high[0] - low[0])


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """``room`` divided among those who want it: as much for each, and what one leaves for the others."""
    shares = [0] * len(wanted)
    for left, i in zip(range(len(wanted), 0, -1), sorted(range(len(wanted)), key=lambda i: wanted[i]), strict=True):
        shares[i] = min(wanted[i], room // left)
        room -= shares[i]
    return shares
