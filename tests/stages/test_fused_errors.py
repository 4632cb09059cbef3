"""The fused errors of candidates against torch's: on a GPU bit for bit but for sums, and in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from profile_cases import ALL

from kvcal.stages.profile import sensitivity
from kvcal.stages.profile.sensitivity import fused_errors

LENGTHS = (4 + 128 + 41, 140, 3, 5)


def keys_and_gradients(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads of three sizes, a constant channel and a constant token, in the axes of a projection's output."""
    torch.manual_seed(head_dim)
    x_BNTD = torch.randn(4, 3, LENGTHS[0], head_dim) * torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)
    x_BNTD[:, 1, :, 2], x_BNTD[:, 2, 5] = 0.7, -3.0
    return x_BNTD.transpose(1, 2).contiguous().transpose(1, 2), torch.randn_like(x_BNTD)


@pytest.mark.gpu
@pytest.mark.parametrize("param_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_gpu_makes_the_errors_that_torch_makes(monkeypatch, side: str, head_dim: int, param_dtype) -> None:
    """With a weight on one channel, the weighted sum is exact in fp64: one wrong bit would show."""
    x_BNTD, g_BNTD = keys_and_gradients(head_dim)
    one_channel = torch.zeros_like(g_BNTD)
    one_channel[..., 2] = -1.0
    for g, rtol in ((one_channel, 1e-13), (g_BNTD, 1e-6)):
        given = [tensor.cuda() for tensor in (x_BNTD.bfloat16(), g, torch.tensor(LENGTHS))]
        found = sensitivity.quantization_errors(*given, ALL[side], 4, torch.bfloat16, param_dtype, side)
        with monkeypatch.context() as patch:
            patch.setattr(sensitivity, "is_fused", lambda *_: False)
            plain = sensitivity.quantization_errors(*given, ALL[side], 4, torch.bfloat16, param_dtype, side)
        torch.testing.assert_close(found.weighted_BNC, plain.weighted_BNC, rtol=rtol, atol=0)
        torch.testing.assert_close(found.squared_BC, plain.squared_BC, rtol=1e-6, atol=0)
        constant = 1 if side == "k" else None  # that head's channel 2 has no range, and no error
        heads = [head for head in range(3) if head != constant]
        assert float(found.weighted_BNC[0, heads].min()) > 0 and not found.weighted_BNC[2].any()
    again = sensitivity.quantization_errors(*given, ALL[side], 4, torch.bfloat16, param_dtype, side)
    assert torch.equal(again.weighted_BNC, found.weighted_BNC) and torch.equal(again.squared_BC, found.squared_BC)


@pytest.mark.gpu
def test_a_range_beyond_the_parameters_is_not_finite_on_a_gpu() -> None:
    x_BNTD = torch.tensor([-6e4, 6e4]).view(1, 1, 2, 1).cuda()
    given = (x_BNTD, x_BNTD, torch.tensor([2]).cuda(), (1, 8), "channel", 32, 0, torch.float32)
    assert fused_errors(*given, torch.float16)[1].isfinite().tolist() == [[False, True]]
    assert fused_errors(*given, torch.bfloat16)[1].isfinite().all()


def compare_in_the_interpreter() -> None:
    """float16, as the interpreter rounds to bfloat16 in another way than devices."""
    for head_dim, axis, size in ((16, "channel", 32), (80, "channel", 128), (80, "token", 80), (16, "token", 16)):
        x_BNTD, g_BNTD = keys_and_gradients(head_dim)
        wanted = [sensitivity.Candidate(bits, axis, size) for bits in (1, 4)]
        dtypes = (torch.float16, torch.float16)
        plain = sensitivity.quantization_errors(x_BNTD, g_BNTD, torch.tensor(LENGTHS), wanted, 4, *dtypes)
        found = fused_errors(x_BNTD, g_BNTD, torch.tensor(LENGTHS), (1, 4), axis, size, 4, *dtypes)
        torch.testing.assert_close(found[0], plain.weighted_BNC, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1], plain.squared_BC, rtol=1e-6, atol=0)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed; it comes with torch for CUDA")
def test_the_kernel_s_arithmetic_is_torch_s() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    code = "import test_fused_errors; test_fused_errors.compare_in_the_interpreter()"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
