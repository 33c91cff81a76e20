"""A training run in bf16 on CUDA: engine and trainer agree, runs repeat."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_training import Logs

from qerl.trainer.trainer import QeRLTrainer

pytestmark = pytest.mark.gpu
MakeTrainer = Callable[..., QeRLTrainer]


@pytest.mark.parametrize(
    ("weights", "head"),
    [("bf16", "bf16"), ("nvfp4", "bf16"), ("nf4", "bf16"), ("mxfp4", "bf16"), ("nvfp4", "nvfp4"), ("bf16", "nvfp4")],
)
def test_engine_and_trainer_agree_in_bf16(weights: str, head: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    logs = Logs()
    made = trainer(
        extra={"callbacks": [logs]},
        weights=weights,
        head=head,
        use_cpu=False,
        max_steps=6,
        aqn_schedule="none",
        parity_tokens=64,
    )
    made.train()
    assert made.accelerator.device.type == "cuda"
    assert logs.worst("parity/mean") < 1e-2
    assert all(0.9 < ess <= 1 for ess in logs.values("sampling/ess"))


def test_noise_and_gradient_checkpointing_on_cuda(trainer: MakeTrainer) -> None:
    logs = Logs()
    made = trainer(extra={"callbacks": [logs]}, use_cpu=False, max_steps=4, gradient_checkpointing=True)
    made.train()
    assert logs.worst("parity/mean") < 1e-2
    assert logs.values("sampling/sampling_logp_difference/mean")[1] > 3 * logs.values("parity/mean")[1]
