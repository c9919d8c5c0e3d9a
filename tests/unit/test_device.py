"""Which GPUs a process sees, for each way a scheduler may have narrowed them before."""

from __future__ import annotations

import pytest

from runtime import device


@pytest.mark.parametrize(
    ("kind", "before", "gpus", "after"),
    [
        ("cuda", {}, [0, 2], {"CUDA_VISIBLE_DEVICES": "0,2"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4,5,6"}, [2], {"CUDA_VISIBLE_DEVICES": "6"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, [1], {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ("rocm", {}, [1], {"HIP_VISIBLE_DEVICES": "1"}),
        ("rocm", {"HIP_VISIBLE_DEVICES": "3,2"}, [0], {"HIP_VISIBLE_DEVICES": "3"}),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "3,2"}, [1], {"HIP_VISIBLE_DEVICES": "2"}),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "6,7"}, [1], {"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, [], {}),
        ("cuda", {"PATH": "/bin"}, [], {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_visible(kind, before, gpus, after) -> None:
    assert device.visible(gpus, before, kind) == after


def test_more_gpus_than_the_scheduler_shows() -> None:
    with pytest.raises(ValueError, match=r"GPU 2 .* shows 2"):
        device.visible([2], {"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda")


@pytest.mark.parametrize(("file", "expected"), [("dev/kfd", "rocm"), ("dev/nvidiactl", "cuda"), ("dev/null", "cpu")])
def test_platform_is_what_the_drivers_say(tmp_path, file, expected) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / file).touch()
    assert device.platform(tmp_path) == expected
