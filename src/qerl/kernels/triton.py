"""What the Triton kernels share: the interpreter flag and rounding.

With ``TRITON_INTERPRET=1`` (set before the first import) kernels run on the CPU in numpy. Three things
differ there, and `INTERPRETED` selects the right form of each: bf16 matrix products are wrong (operands are
upcast to fp32), casts to bf16 truncate, and there is no inline assembly.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 to `dtype` (fp32, fp16 or bf16), nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)
