"""RMSNorm: formula, noise slot, and on a GPU the kernels and the equality of trainer's and engine's bits."""

import importlib.util
import re

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once

from qerl.kernels.rms_norm import add_rms_norm, rms_norm

DTYPES = [(torch.bfloat16, 2.5e-3), (torch.float32, 1e-6)]
GPU_WIDTHS = [1, 64, 128, 576, 3584, 5120, 8192]


def _exact(x: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    scale = weight.double() if noise is None else weight.double() + noise.double()
    return scale * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype, bound", DTYPES, ids=["bf16", "fp32"])
def test_formula_and_gradients_on_the_cpu(dtype: torch.dtype, bound: float) -> None:
    x = torch.randn(2, 3, 96).to(dtype).requires_grad_()
    weight = torch.rand(96).to(dtype).requires_grad_()
    noise, dy = 0.01 * torch.randn(96), torch.randn(2, 3, 96).to(dtype)
    y = rms_norm(x, weight, noise, 1e-6)
    gradients = torch.autograd.grad(y, (x, weight), dy)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = _exact(*exact_inputs, noise)
    assert rms_ratio(y, expected) < bound
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, exact_inputs, dy.double()), strict=True):
        assert rms_ratio(gradient, exact) < bound


def test_noise_far_below_a_bf16_step_still_acts() -> None:
    x, weight = torch.randn(64, 256).bfloat16(), torch.ones(256).bfloat16()
    noise = 5e-4 * torch.randn(256)
    changed = rms_norm(x, weight, noise, 1e-6) != rms_norm(x, weight, None, 1e-6)
    assert 0.02 < changed.float().mean() < 0.5
    assert torch.equal((weight + noise.bfloat16()).unique(), torch.ones(1).bfloat16())
    assert torch.equal(rms_norm(x, weight, torch.zeros(256), 1e-6), rms_norm(x, weight, None, 1e-6))


def test_add_equals_the_two_steps() -> None:
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    weight = torch.rand(64).bfloat16()
    y, total = add_rms_norm(x, residual, weight, None, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight, None, 1e-6))


def test_misuse_is_named() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="last dimension"):
        rms_norm(x, torch.ones(7), None, 1e-6)
    with pytest.raises(ValueError, match="noise must be float32"):
        rms_norm(x, weight, torch.zeros(8).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(x, x[:2], weight, None, 1e-6)
    with pytest.raises(ValueError, match="no backward"):
        add_rms_norm(x.requires_grad_(), x.detach(), weight, None, 1e-6)
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        rms_norm(torch.ones(3, 8, dtype=torch.int64), weight, None, 1e-6)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("settled", [False, True], ids=["any-launch-before", "settled"])
def test_what_is_loaded_before_the_wait(settled: bool) -> None:
    """In the PTX for sm_90, which needs no GPU: weight (bf16) and noise (fp32), and only where no launch may just be
    writing them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qerl.kernels.rms_norm.triton import rms_norm_forward_kernel as kernel

    types = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "noise": "*fp32", "y": "*bf16"}
    types |= {"new_residual": "*bf16", "rstd": "*fp32", "H": "i32", "eps": "fp32"}
    flags = {"HAS_RESIDUAL": True, "HAS_NOISE": True, "BLOCK": 128, "PDL": True, "SETTLED": settled}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in flags.items()}
    options = {"launch_pdl": True, "num_warps": 4}
    source = ASTSource(kernel, signature, fixed, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, after = (re.findall(r"(?:ld|st)\.global\.\w+", part) for part in ptx.split("griddepcontrol.wait"))
    constants = ["ld.global.b16", "ld.global.b32"]
    assert before == (constants if settled else [])
    assert after[:-3] == ([] if settled else constants) + ["ld.global.b16"] * 2
    assert all(access.startswith("st") for access in after[-3:])


@pytest.mark.gpu
def test_gpu_weights_made_by_the_launch_before() -> None:
    """And weights and noise out of columns, which are copied right before."""
    x, residual = torch.randn(3, 576, device="cuda").bfloat16(), torch.randn(3, 576, device="cuda").bfloat16()
    columns = torch.rand(576, 3, device="cuda")
    for _ in range(20):
        columns.uniform_()
        weight, noise = columns.bfloat16()[:, 0], columns[:, 1]
        expected = _exact(x, weight.clone(), noise.clone())
        torch.cuda.synchronize()
        assert rms_ratio(rms_norm(x, columns[:, 0].bfloat16(), noise, 1e-6), expected) < 2.5e-3
        y, total = add_rms_norm(x, residual, weight, noise, 1e-6)
        assert rms_ratio(y, _exact(total, weight, noise)) < 2.5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", GPU_WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 1500])
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_against_fp64(rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
    weight = (1 + 0.1 * torch.randn(width, device="cuda")).to(dtype).requires_grad_()
    noise, dy = 0.01 * torch.randn(width, device="cuda"), torch.randn(rows, width, device="cuda").to(dtype)
    y = rms_norm(x, weight, noise, 1e-6)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = _exact(*exact_inputs, noise)
    dx64, dweight64 = torch.autograd.grad(expected, exact_inputs, dy.double())
    assert rms_ratio(y, expected) <= rounded_once(expected, dtype)
    # With one column the exact dx is eps-sized and cancellation leaves noise.
    if width > 1:
        assert rms_ratio(dx, dx64) <= rounded_once(dx64, dtype)
    assert rms_ratio(dweight, dweight64) <= rounded_once(dweight64, dtype)
    again = torch.autograd.grad(rms_norm(x, weight, noise, 1e-6), (x, weight), dy)
    assert torch.equal(again[0], dx) and torch.equal(again[1], dweight)


@pytest.mark.gpu
@pytest.mark.parametrize("width", GPU_WIDTHS)
def test_gpu_bits_do_not_depend_on_caller_or_batch(width: int) -> None:
    x, residual = (torch.randn(64, width, device="cuda").bfloat16() for _ in range(2))
    weight, noise = torch.rand(width, device="cuda").bfloat16(), 0.01 * torch.randn(width, device="cuda")
    y, total = add_rms_norm(x, residual, weight, noise, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, noise, 1e-6))
    for rows in (slice(0, 1), slice(3, 8)):
        assert torch.equal(y[rows], rms_norm(total[rows], weight, noise, 1e-6))
    strided = torch.stack((total, total), -1)[..., 0]
    assert torch.equal(y, rms_norm(strided, weight, noise, 1e-6))


@pytest.mark.gpu
def test_gpu_cuda_graph() -> None:
    x, residual = (torch.randn(8, 3584, device="cuda").bfloat16() for _ in range(2))
    weight, noise = torch.rand(3584, device="cuda").bfloat16(), torch.zeros(3584, device="cuda")
    add_rms_norm(x, residual, weight, noise, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = add_rms_norm(x, residual, weight, noise, 1e-6)
    x.normal_()
    noise.normal_(std=0.01)
    graph.replay()
    expected, expected_total = add_rms_norm(x, residual, weight, noise, 1e-6)
    assert torch.equal(y, expected) and torch.equal(total, expected_total)


def check_fp32_stream(device: str) -> None:
    """bf16 layer output added to an fp32 residual stream: nothing is rounded but the result; dx is fp32."""
    x = torch.randn(7, 576, device=device).bfloat16()
    weight, noise = torch.rand(576, device=device).bfloat16(), 0.01 * torch.randn(576, device=device)
    residual = 8 * torch.randn(7, 576, device=device)
    y, total = add_rms_norm(x, residual, weight, noise, 1e-6)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)
    assert torch.equal(y, rms_norm(total, weight, noise, 1e-6))
    exact = _exact(total, weight, noise)
    assert rms_ratio(y, exact) <= 1.05 * rounded_once(exact, torch.bfloat16)
    leaf, dy = total.clone().requires_grad_(), torch.randn(7, 576, device=device).bfloat16()
    (dx,) = torch.autograd.grad(rms_norm(leaf, weight, noise, 1e-6), leaf, dy)
    exact_leaf = total.double().requires_grad_()
    (exact_dx,) = torch.autograd.grad(_exact(exact_leaf, weight, noise), exact_leaf, dy.double())
    assert dx.dtype == torch.float32
    assert rms_ratio(dx, exact_dx) < 1e-5


def test_fp32_stream_with_bf16_weights() -> None:
    check_fp32_stream("cpu")


@pytest.mark.gpu
def test_gpu_fp32_stream_with_bf16_weights() -> None:
    check_fp32_stream("cuda")
