"""`mpiddl run` with `fit` and `evaluate` of Keras: weights and metrics are those of one rank."""

from __future__ import annotations

import json
import re
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
    jax = env["KERAS_BACKEND"] == "jax"  # one rank with JAX ends at 0.59, after epochs with more
    assert (max(mine["accuracy"]) if jax else mine["accuracy"][-1]) > 0.6


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
    assert done.returncode != 0 and "rank 1 at the end of the program" in done.stderr


STOPS = """
import numpy as np, keras
from mpi4py import MPI
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
def stop(batch, logs):
    model.stop_training = MPI.COMM_WORLD.rank == 1 and batch == 1
each = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
model.fit(np.ones((80, 3)), np.ones((80, 1)), batch_size=8, epochs=2, verbose=0, callbacks=[each])
"""


def test_ranks_that_leave_fit_at_different_steps_are_told(tmp_path, mpirun, env):
    program = tmp_path / "program.py"
    program.write_text(STOPS)
    done = mpirun(2, "mpiddl", "run", program, env=env)
    assert done.returncode != 0 and "expected that all ranks do the same" in done.stderr
    assert "at gradients of 4 numbers of a Keras model" in done.stderr


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_loss_that_is_no_mean_is_computed_whole(tmp_path, command, mpirun, env, reduction):
    program = tmp_path / "program.py"
    text = PROGRAM.replace("from_logits=True", f"from_logits=True, reduction={reduction!r}").replace("{batch}", "20")
    program.write_text(text.replace("Adam(0.01)", "SGD(0.001)").replace("model.fit(x, y,", "model.fit(x[:80], y[:80],"))
    (alone,) = histories(command(sys.executable, program, env=env).stdout)
    found = mpirun(2, "mpiddl", "run", program, env=env)
    assert found.returncode == 0, found.stderr
    (mine,) = histories(found.stdout)
    for name, values in alone.items():
        assert mine[name] == pytest.approx(values, rel=1e-3, abs=1e-4), name
    assert "every rank computed the whole batch, because its loss is no plain mean" in re.sub(r"[│\s]+", " ", found.stderr)


OWN_LOGS = """
import numpy as np, keras
from mpi4py import MPI
class Logs(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)
    def call(self, x):
        return self.last(x)
    def get_metrics_result(self):  # an own one, which mpiddl does not see
        return {}
    def train_step(self, *given):
        found = super().train_step(*given)
        mean = keras.ops.mean(given[-1][0])
        return ({"mean": mean}, *found[1:]) if isinstance(found, tuple) else {"mean": mean}
model = Logs()
model.compile(optimizer="sgd", loss="mse")
model(np.ones((1, 1)))
x = np.arange(12.0).reshape(-1, 1)
seen = []
each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["mean"])))
model.fit(x, x, batch_size=12, verbose=0, callbacks=[each])
assert seen == [5.5], seen
"""


def test_logs_of_an_own_step_are_the_mean_over_ranks(tmp_path, mpirun, env):
    program = tmp_path / "program.py"
    program.write_text(OWN_LOGS)
    done = mpirun(2, "mpiddl", "run", program, env=env)
    assert done.returncode == 0, done.stderr
