"""AQN noise schedules: sigma as a function of the update (arXiv 2510.11696, section 3.3, equation 9).

With M total updates, K stages and t the 1-based update at rollout time:

``exponential``  (the published code) stage k = min(K-1, floor(t K / M)); sigma is 0 in stage 0, then
    ``sigma_start (sigma_end / sigma_start)^((k-1)/(K-2))``: stage 1 has sigma_start, stage K-1 has sigma_end.
``paper``        stage floor((t-1) / floor(M/K)) clamped to K-1; the same curve with exponent (k-1)/(K-1), so stage
    K-1 stays above sigma_end; stage 0 is 0.
``linear``, ``cosine``, ``logarithmic``  run between the same ends over the same stages as ``exponential``.
``constant``     sigma_start throughout. ``none``: 0.
"""

import math
from dataclasses import dataclass

SCHEDULES = ("exponential", "paper", "linear", "cosine", "logarithmic", "constant", "none")
MIN_STAGES = 3


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Standard deviation of the noise on the RMSNorm scales.

    Attributes:
        kind: one of :data:`SCHEDULES`.
        sigma_start: sigma of the first noisy stage.
        sigma_end: sigma of the last stage.
        num_stages: K, at least 3.
        total_updates: M, the planned optimizer updates.

    Raises:
        ValueError: unknown kind, a sigma that is not positive and finite, K < 3, or M < 1.
    """

    kind: str
    sigma_start: float
    sigma_end: float
    num_stages: int
    total_updates: int

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"aqn_schedule={self.kind!r} is unknown; choose from {', '.join(SCHEDULES)}")
        for name in ("sigma_start", "sigma_end"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be positive and finite; for no noise set aqn_schedule='none'")
        if self.num_stages < MIN_STAGES:
            raise ValueError(f"num_stages={self.num_stages} must be at least {MIN_STAGES}: stage 0 has no noise")
        if self.total_updates < 1:
            raise ValueError(f"total_updates={self.total_updates} must be at least 1")

    def stage(self, update: int) -> int:
        """Stage of the 1-based ``update``, clamped to the last one."""
        if update < 1:
            raise ValueError(f"updates count from 1, got {update}")
        if self.kind == "paper":
            length = max(1, self.total_updates // self.num_stages)
            return min(self.num_stages - 1, (update - 1) // length)
        return min(self.num_stages - 1, update * self.num_stages // self.total_updates)

    def sigma(self, update: int) -> float:
        """Standard deviation at the 1-based ``update``."""
        if self.kind == "none":
            return 0.0
        if self.kind == "constant":
            return self.sigma_start
        stage = self.stage(update)
        if stage == 0:
            return 0.0
        last = self.num_stages - (1 if self.kind == "paper" else 2)
        return self._between((stage - 1) / last)

    def _between(self, progress: float) -> float:
        """Sigma at ``progress`` in [0, 1] from sigma_start to sigma_end."""
        start, end = self.sigma_start, self.sigma_end
        if self.kind in ("exponential", "paper"):
            return start * (end / start) ** progress
        if self.kind == "linear":
            weight = progress
        elif self.kind == "cosine":
            weight = (1 - math.cos(math.pi * progress)) / 2
        else:  # logarithmic: fast at first, then flat
            weight = math.log1p(progress * (math.e - 1))
        return start + (end - start) * weight
