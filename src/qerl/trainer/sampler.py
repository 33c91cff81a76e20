"""TRL's prompt order, made a function of (seed, epoch) so that a resumed run draws the prompts it would have drawn."""

import hashlib
from collections.abc import Iterator

from trl.trainer.utils import RepeatSampler


class EpochRepeatSampler(RepeatSampler):
    """``RepeatSampler`` whose shuffle depends on seed and epoch alone.

    TRL's seeds its generator once: a run resumed in a later epoch would start again with the order of the first one.
    transformers and accelerate call :meth:`set_epoch` before every epoch, also after a resume.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of ``epoch`` (from 0) in the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            digest = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=8).digest()
            self.generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        return super().__iter__()
