"""What one step of the engine gave."""

from dataclasses import dataclass
from itertools import zip_longest

from qerl.rollout.core import FinishReason
from qerl.rollout.scheduler import Sample


@dataclass(slots=True)
class DrawnTokens:
    """The tokens that one step gave, column by column.

    Most steps give a sample one token; one that verified drafts may give it several, which lie together in order.
    """

    samples: list[Sample]
    token_ids: list[int]
    logprobs: list[float]
    temperature_logprobs: list[float]

    def reasons(self) -> list[FinishReason | None]:
        """Why each token's sample ended with it; None where it goes on."""
        pairs = zip_longest(self.samples, self.samples[1:])
        return [sample.finish_reason if sample is not following else None for sample, following in pairs]

    def columns(self) -> tuple[list, list[int], list[float], list[float], list[FinishReason | None]]:  # type: ignore[type-arg]
        """samples, token ids, both log-probs, and :meth:`reasons`."""
        return self.samples, self.token_ids, self.logprobs, self.temperature_logprobs, self.reasons()
