import pytest
from tests import compare

FP64 = ["train.precision=fp64", "log.every_steps=1", "mode.threads=1", "eval.test=false"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("model", ["digits_cnn", "digits_mlp"])
def test_parity(train, ranks, model):
    words = [f"experiment={model}", "train.max_steps=60", "train.max_epochs=null", *FP64]
    one = train(*words).ok().folder
    many = train(*words, "mode=multigpu", ranks=ranks).ok().folder
    a, b = compare.losses(one), compare.losses(many)
    assert len(a) == 60
    print(
        max(abs(x - y) for x, y in zip(a, b)),
        compare.largest_difference(compare.weights(one), compare.weights(many)),
    )
    assert max(abs(x - y) for x, y in zip(a, b)) < 1e-9
    assert compare.largest_difference(compare.weights(one), compare.weights(many)) < 1e-9


@pytest.mark.parametrize("ranks", [0, 2, 3, 4])
@pytest.mark.parametrize("stop", [5, 7])
def test_resume(train, tmp_path, ranks, stop):
    words = [
        "experiment=digits_cnn",
        "model.dropout=0.2",
        "train.ema_decay=0.9",
        "data.augment=true",
        "train.max_epochs=2",
        "log.every_steps=1",
        "mode.threads=1",
        "scheduler._target_=tests.probes.FaultyCosine",
        "eval.every_steps=6",
    ]
    if ranks:
        words.append("mode=multigpu")
    a = train(*words, "run_id=whole", ranks=ranks).ok().folder
    r = train(*words, "run_id=cut", ranks=ranks, env={"TEST_FAULT": f"SIGTERM@{stop}:0"})
    assert r.exit_codes[0] == (0 if ranks else 143), r.text
    assert compare.last(r.folder).name == f"step-{stop}"
    train(*words, "run_id=cut", ranks=ranks).ok()
    compare.assert_bitwise_equal(a, r.folder)
