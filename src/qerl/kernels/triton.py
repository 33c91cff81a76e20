"""What the Triton kernels share: the interpreter flag, rounding, and the order between launches.

With ``TRITON_INTERPRET=1`` (set before the first import) kernels run on the CPU in numpy. Three things
differ there, and `INTERPRETED` selects the right form of each: bf16 matrix products are wrong (operands are
upcast to fp32), casts to bf16 truncate, and there is no inline assembly.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 to `dtype` (fp32, fp16 or bf16), nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def start_after_predecessor(PDL: tl.constexpr):
    """First line of a kernel: with programmatic dependent launch, let the next kernel start and wait for the last one.

    Every kernel waits before it reads or writes anything that another one touches, so an early start of the next one
    overlaps its launch only. A kernel waits for the *completion* of the one before it, which had waited itself: all
    earlier work is visible too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_successor_start(PDL: tl.constexpr):
    """The first half of `start_after_predecessor`: constants may be loaded between the two.

    What counts as constant is written by no kernel that is launched this way, and before an ordinary launch: nothing
    after that launch starts before the write is complete.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """The second half of `start_after_predecessor`."""
    if PDL:
        gdc_wait()


@triton.jit
def arrive_last(counter, expected):
    """Whether this program is the last of `expected` to arrive at `counter`, which it then sets back to 0.

    What the programs stored before is visible to the last one, if it loads past the L1 cache (``.cg``). Who is last
    is a matter of timing: the caller must compute the same whoever it is.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
