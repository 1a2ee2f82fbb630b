"""`mpiddl run` with `fit` and `evaluate` of Keras: weights and metrics are those of one rank."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

# Not importorskip: TensorFlow and the triton of PyTorch may crash in one process.
needs_keras = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more, needs_keras]

PROGRAM = """
import json
import numpy as np
import keras
from keras import layers
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x = rng.normal(size=(83, 10)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int32")
model = keras.Sequential([layers.Dense(16, activation="tanh", kernel_regularizer="l2"), layers.Dense(2)])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
              metrics=["accuracy"])
losses = []
each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))
history = model.fit(x, y, batch_size={batch}, epochs=2, validation_split=0.2, verbose=0, callbacks=[each]).history
history.update(each=losses, evaluated=list(map(float, model.evaluate(x, y, batch_size=7, verbose=0))),
               predicted=[float(model.predict(x, verbose=0).sum())], weights=[float(abs(w).sum()) for w in model.get_weights()])
print(json.dumps(history))
"""

NORM = PROGRAM.replace("layers.Dense(2)]", "layers.BatchNormalization(momentum=0.5), layers.Dense(2)]").replace(
    "epochs=2", "epochs=9")


def histories(text: str) -> list[dict[str, list[float]]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(params=["torch", "tensorflow", "jax"])
def env(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return {"KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("batch", [20, 3], ids=["", "fewer rows than ranks"])
def test_weights_and_metrics_are_those_of_one_rank(tmp_path, command, mpirun, env, batch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{batch}", str(batch)))
    (alone,) = histories(command(sys.executable, program, env=env).stdout)
    found = mpirun(4, "mpiddl", "run", program, env=env)
    assert found.returncode == 0, found.stderr
    (mine,) = histories(found.stdout)
    assert mine.keys() == alone.keys()
    for name, values in alone.items():
        assert mine[name] == pytest.approx(values, rel=1e-3, abs=1e-4), name
    assert f"{len(alone['each'])} steps of fit" in found.stderr


def test_batch_normalisation_trains_and_is_alike_on_all_ranks(tmp_path, mpirun, env):
    program = tmp_path / "program.py"
    program.write_text(NORM.replace("{batch}", "5") + """
from mpi4py import MPI
assert len(set(MPI.COMM_WORLD.allgather(repr([w.tolist() for w in model.get_weights()])))) == 1
""")
    found = mpirun(3, "mpiddl", "run", program, env=env)
    assert found.returncode == 0, found.stderr
    (mine,) = histories(found.stdout)
    assert mine["loss"][-1] < 0.9 * mine["loss"][0]
    assert mine["accuracy"][-1] > 0.6


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_strategy_that_exchanges_models_only_replicates(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{batch}", "20"))
    found = mpirun(2, "mpiddl", "run", "--strategy", "gossip", program, env={"KERAS_BACKEND": "torch"})
    assert found.returncode == 0, found.stderr
    assert "only replicated, not distributed" in found.stderr


LEAVES = """
import sys
import numpy as np, keras
from mpi4py import MPI
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
x, y = np.ones((8, 3)), np.ones((8, 1))
model.fit(x, y, verbose=0)
if MPI.COMM_WORLD.rank == 1:
    sys.exit()
model.fit(x, y, verbose=0)
"""


def test_a_rank_that_leaves_while_others_train_is_told(tmp_path, mpirun, env):
    program = tmp_path / "program.py"
    program.write_text(LEAVES)
    done = mpirun(3, "mpiddl", "run", program, env=env)
    assert done.returncode != 0 and "it is over on 1 of 3 ranks" in done.stderr
