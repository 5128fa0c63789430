"""GPUs as users name them."""

import pytest

from kimi_jax.errors import InputError
from kimi_jax.planning.gpus import Gpus, read_gpus


@pytest.mark.parametrize(
    "text, gpus",
    [
        ("8xH200", Gpus(1, 8, 141.0, "H200")),
        ("16xh200", Gpus(2, 8, 141.0, "H200")),
        ("2x4xB200", Gpus(2, 4, 180.0, "B200")),
        ("12x141", Gpus(1, 12, 141.0, "")),
        ("2x8x141GB", Gpus(2, 8, 141.0, "")),
        ("1x79.5", Gpus(1, 1, 79.5, "")),
    ],
)
def test_numbers_nodes_and_models(text, gpus):
    assert read_gpus(text) == gpus
    assert f"{gpus.gigabytes:g} GB" in str(gpus) and str(gpus.count) in str(gpus)


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "is not of the form 8xH200") for text in ("", "8", "H200", "0xH200", "1x1x1x1")),
        ("8x", "no GPU ''"),
        ("8xH2000", "known are A100"),
        ("8xH20O", "did you mean h20"),
        ("8xＨ200", "no GPU"),
        ("8x0", "with memory"),
        ("9999x9999xH200", "at most 1024 GPUs"),
    ],
)
def test_what_is_no_number_of_gpus_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        read_gpus(text)
