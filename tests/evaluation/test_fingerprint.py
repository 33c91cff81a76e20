"""The identity of weights changes with the weights."""

from pathlib import Path

from qerl.evaluation.environment import describe_environment
from qerl.evaluation.fingerprint import model_fingerprint


def test_fingerprint_follows_model_and_adapter(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    (model / "model.safetensors").write_bytes(b"1234")
    (adapter / "adapter_model.safetensors").write_bytes(b"5678")
    base, adapted = model_fingerprint(model), model_fingerprint(model, adapter)
    assert base == model_fingerprint(model)
    assert base != adapted
    (adapter / "adapter_model.safetensors").write_bytes(b"5679")
    assert model_fingerprint(model, adapter) != adapted
    (model / "notes.txt").write_text("stray files do not count")
    assert model_fingerprint(model) == base
    (model / "model.safetensors").write_bytes(b"12345")
    assert model_fingerprint(model) != base
    assert model_fingerprint(Path("org/model-on-a-hub")) is None


def test_environment_is_plain_and_anonymous() -> None:
    import json
    import platform

    environment = describe_environment()
    text = json.dumps(environment)
    assert environment["packages"]["torch"]
    assert environment["cpu_cores"] >= 1
    assert platform.node() not in text
