"""What a terminal shows: our lines and warnings, not the progress bars and hints of the libraries below."""

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Set up logging for a command (mutates global state): INFO of qerl, warnings of the rest, no stray bars."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported, if it ever is
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("qerl").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)

    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
