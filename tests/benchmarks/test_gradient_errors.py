"""`benchmarks/accuracy/gradient_errors.py`: where FP8's errors are, of a network of one block."""

import functools

import numpy as np
import pytest

from benchmarks.accuracy import gradient_errors, parity, scale_models

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def test_errors_are_those_of_the_pass_and_layer(monkeypatch):
    module = functools.partial(scale_models.ResMLP, depth=1)
    model = scale_models.make_model("vit", module, parity.image_batch)
    params, other = gradient_errors.train(model, 2)
    monkeypatch.setattr(gradient_errors, "VARIANTS", ("fp8-hidden", "fp8-backward"))
    found = {
        name: gradient_errors.compare(mine, reference)
        for name, mine, reference in gradient_errors.measure(model, params, other, 2)
    }
    assert len(found) > 3  # the layers of its own
    assert found["float16"][0] < 0.01 < found["fp8-hidden"][0] < 0.5
    assert found["fp8-backward"][2] == found["float16"][2] != found["fp8-hidden"][2]
    layers = [error for name, (error, *_) in found.items() if "/" in name]
    assert layers and max(layers) < 1.5 * found["fp8-hidden"][0]


def test_what_is_compared():
    a, b = np.float32([3.0, 4.0]), np.float32([0.0, 0.0])
    reference = [gradient_errors.Gradient(1.0, a), gradient_errors.Gradient(1.0, a)]
    found = [gradient_errors.Gradient(1.5, b), gradient_errors.Gradient(2.5, 2 * a)]
    assert gradient_errors.compare(found, reference) == (1.0, 0.0, 1.0, 0.5)


def test_bad_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        gradient_errors.main(["--batches", "0"])
    assert "--batches must be positive, got 0" in capsys.readouterr().err
