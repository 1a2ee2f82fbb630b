"""A model with a convolution that is one file and one entry of `mpiddl.registry`: trained, saved, loaded, compared by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.lib.stride_tricks import sliding_window_view

import mpiddl
import mpiddl.errors
from mpiddl.cli.commands import mpiddl as command
from mpiddl.registry import MODELS, OPTIMISERS, Entry
from mpiddl.training.builders import unused_settings
from mpiddl.training.job import make_job

pytestmark = pytest.mark.no_mpi


@dataclass(frozen=True)
class Convolution:
    """3 x 3 filters, ReLU, one dense layer, cross-entropy."""

    features: int
    outputs: int
    channels: int = 4

    @property
    def side(self):
        return int(self.features**0.5)

    @cached_property
    def shapes(self):
        return {"filters": (9, self.channels), "dense": ((self.side - 2) ** 2 * self.channels, self.outputs)}

    def init(self, params, rng):
        for view in params.values():
            view[:] = rng.standard_normal(view.shape) * 0.2

    def _hidden(self, params, x):
        windows = sliding_window_view(x.reshape(-1, self.side, self.side), (3, 3), axis=(1, 2)).reshape(len(x), -1, 9)
        return windows, np.maximum(windows @ params["filters"], 0).reshape(len(x), -1)

    def predict(self, params, x):
        return self._hidden(params, x)[1] @ params["dense"]

    def gradient(self, params, x, y, grad):
        windows, hidden = self._hidden(params, x)
        outputs = hidden @ params["dense"]
        chances = np.exp(outputs - outputs.max(axis=1, keepdims=True, initial=-np.inf))
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(y)), y]).sum()
        correct = int((outputs.argmax(axis=1) == y).sum())
        chances[np.arange(len(y)), y] -= 1
        back = ((chances @ params["dense"].T) * (hidden > 0)).reshape(*windows.shape[:2], self.channels)
        grad["filters"][:] = np.einsum("nwk,nwc->kc", windows, back)
        grad["dense"][:] = hidden.T @ chances
        return mpiddl.Score(float(loss), correct)


@pytest.fixture
def registered(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS._entries, "convolution", Entry(f"{__name__}:Convolution", "A convolution."))
    monkeypatch.chdir(tmp_path)


def called(*words):
    done = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_registered_model_trains_saves_loads_and_predicts(registered, tmp_path):
    job = ("--model", "convolution:channels=6", "--epochs", 4, "--rate", 0.05, "--quiet")
    called("train", *job, "--out", "run")
    found = json.loads(called("evaluate", "run", "--json"))
    assert found["accuracy"] > 0.85
    called("predict", "run", "digits", "-o", "out.npy")
    trained = mpiddl.load("run")
    assert trained.model == Convolution(64, 10, channels=6) and trained.about["model"]["name"] == "convolution"
    assert len(np.load("out.npy")) == found["rows"]


def test_parameters_of_built_in_names():
    made = OPTIMISERS.make("adam:beta1=0.5", weight_decay=0.25)
    assert (made.beta1, made.weight_decay) == (0.5, 0.25)
    assert OPTIMISERS.make("momentum:nesterov=false", momentum=0.9).nesterov is False  # bool("false") would be True
    said = r"optimiser adam: got 'beta=0\.5', expected parameters among beta1=0\.9"
    with pytest.raises(mpiddl.errors.UsageError, match=said):
        OPTIMISERS.make("adam:beta=0.5")


@pytest.mark.parametrize("table", [MODELS, OPTIMISERS])
def test_every_entry_leads_to_something_with_a_sentence(table):
    for name, entry in table.items():
        assert callable(table.find(name)) and entry.about.endswith(".")


@pytest.mark.parametrize(("settings", "said"), [
    ({"model": "softmax", "hidden": (5,), "activation": "tanh"}, "model softmax does not use the settings hidden, activation"),
    ({"model": "softmax"}, ""),
    ({"model": "mlp", "hidden": (5, 5), "activation": "tanh", "initialisation": "glorot"}, ""),
])  # fmt: skip
def test_settings_that_a_model_does_not_use_are_told(capsys, settings, said):
    mpiddl.train(data="digits", epochs=1, **settings)
    assert ("does not use" in capsys.readouterr().err) == bool(said)
    assert unused_settings(make_job(settings)) == said
