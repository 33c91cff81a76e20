"""4-bit weight formats: plain-torch ground truth, checkpoints on disk, the streaming quantizer.

Modules: `base` (packed tensor, format interface, errors), `e2m1`, `nvfp4`, `nf4`, `mxfp4`, `mxfp4_as_nvfp4` (equal
values in another encoding), `checkpoint` (read), `writer`, `disk_layout` (names and config of the packed tensors on
disk), `quantizer`, `selection`, `gguf`.
"""
