"""Identity of the weights behind a result, so that stored results never speak for other weights."""

import hashlib
from pathlib import Path

_MODEL_FILES = ("*.safetensors", "*.bin", "*.gguf", "config.json", "tokenizer.json", "chat_template.jinja")
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")


def model_fingerprint(model: Path, adapter: Path | None = None) -> str | None:
    """A short digest of a local model and adapter, ``None`` for a model that is no local folder or file.

    The model counts by names, sizes and modification times (reading 60 GB to print an accuracy would be
    absurd), the adapter by its contents.
    """
    if model.is_dir():
        files = sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern)})
    elif model.is_file():
        files = [model]
    else:
        return None
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    if adapter is not None:
        for name in _ADAPTER_FILES:
            if (adapter / name).is_file():
                with (adapter / name).open("rb") as file:
                    digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
