"""The order of samples, its slices, the loaders, and the data sets that come with the project."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from ddp_experiments.data import Batch, Batches, EvaluationBatches, Splits, TensorData, order
from ddp_experiments.data.digits import Augmented, digits
from ddp_experiments.data.loader import in_memory
from ddp_experiments.data.synthetic import article, teacher, teacher_weights

CPU = torch.device("cpu")
WORLDS = range(1, 8)


class Numbers(Dataset[Any]):
    """The samples' own numbers, as items that are asked for one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index)


class Drawing(Numbers):
    """Items with random numbers of all three kinds."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor(drawn, dtype=torch.float64), torch.tensor(index)


class Many(Numbers):
    """Items fetched in one call, and never by themselves."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [(torch.tensor([float(i)]), torch.tensor(i)) for i in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("asked for a single item")


class Collating(Numbers):
    @staticmethod
    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]).neg(), torch.stack([y for _, y in items])


class Doubled(TensorData):
    """Tensors in memory whose items are something else."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] * 2, self.targets[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def in_tensors(length: int) -> TensorData:
    return TensorData(torch.arange(length).float().unsqueeze(1), torch.arange(length))


def batches(dataset: Dataset[Any], rank: int = 0, world_size: int = 1, **changes: Any) -> Batches:
    settings: dict[str, Any] = {
        "global_batch_size": 8,
        "accumulation_steps": 1,
        "drop_last": False,
        "seed": 0,
        "device": CPU,
        "dtype": torch.float64,
    }
    return Batches(dataset, rank=rank, world_size=world_size, **settings | changes)


def steps(made: Batches, count: int, epoch: int = 0, samples: int = 0) -> list[Batch]:
    stream = made.starting_at(epoch, samples)
    return [next(stream) for _ in range(count)]


def numbers(batch: Batch) -> list[int]:
    """The samples that count in a rank's batch."""
    return [int(t) for m in batch.microbatches if m.weight_B is None for t in m.targets]


# ---- the order


def test_order_is_a_function_of_seed_and_epoch() -> None:
    first = order.permutation(101, seed=3, epoch=2)
    torch.rand(7)
    assert torch.equal(order.permutation(101, seed=3, epoch=2), first)
    assert not torch.equal(order.permutation(101, seed=4, epoch=2), first)


def test_epochs_have_the_same_samples_in_another_order() -> None:
    epochs = [order.permutation(101, seed=0, epoch=e).tolist() for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(sorted(e) == list(range(101)) for e in epochs)


def test_mix_tells_numbers_and_their_places_apart() -> None:
    seeds = {order.mix(a, b, c) for a in range(9) for b in range(9) for c in range(9)}
    assert len(seeds) == 9**3
    assert all(0 <= s < 2**63 for s in seeds)
    assert order.mix(1, 2) != order.mix(2, 1)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 21, 50, 64])
def test_microbatches_cover_a_batch_exactly_and_evenly(size: int, accumulation_steps: int) -> None:
    for world_size in WORLDS:
        slices = [order.bounds(size, rank, world_size) for rank in range(world_size)]
        lengths = [high - low for low, high in slices]
        assert max(lengths) - min(lengths) <= 1
        covered = []
        for rank, (low, high) in enumerate(slices):
            pieces = order.microbatch_bounds(
                size, rank=rank, world_size=world_size, accumulation_steps=accumulation_steps
            )
            assert len(pieces) == accumulation_steps
            assert pieces[0][0] == low
            assert pieces[-1][1] == high
            covered += [i for a, b in pieces for i in range(a, b)]
        assert covered == list(range(size))
        shares = [
            b - a
            for r in range(world_size)
            for a, b in order.microbatch_bounds(
                size, rank=r, world_size=world_size, accumulation_steps=accumulation_steps
            )
        ]
        assert min(shares) == order.smallest_share(
            [size], world_size=world_size, accumulation_steps=accumulation_steps
        )


# ---- batches


@pytest.mark.parametrize("kind", [in_tensors, Numbers])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_share_each_global_batch_of_an_epoch(
    kind: type[Dataset[Any]], world_size: int, accumulation_steps: int
) -> None:
    data, whole = kind(101), batches(in_tensors(101), global_batch_size=25)  # type: ignore[call-arg]
    split = [
        batches(data, r, world_size, global_batch_size=25, accumulation_steps=accumulation_steps)
        for r in range(world_size)
    ]
    assert whole.steps_per_epoch == 5
    wanted = steps(whole, 7)
    assert [b.count for b in wanted] == [25, 25, 25, 25, 1, 25, 25]
    assert [b.ends_epoch for b in wanted] == [False] * 4 + [True] + [False] * 2
    found = zip(*(steps(s, 7) for s in split), strict=True)
    for want, parts in zip(wanted, found, strict=True):
        assert [n for part in parts for n in numbers(part)] == numbers(want)
        assert {(p.count, p.epoch, p.samples, p.ends_epoch) for p in parts} == {
            (want.count, want.epoch, want.samples, want.ends_epoch)
        }


@pytest.mark.parametrize("kind", [in_tensors, Numbers])
def test_only_a_microbatch_without_a_sample_of_its_own_is_padded(kind: type[Dataset[Any]]) -> None:
    for world_size in (2, 3, 4):
        made = [
            batches(kind(101), r, world_size, global_batch_size=50, accumulation_steps=2)  # type: ignore[call-arg]
            for r in range(world_size)
        ]
        per_step = list(zip(*(steps(m, 3) for m in made), strict=True))
        weights = [[m.weight_B for b in parts for m in b.microbatches] for parts in per_step]
        assert all(w is None for w in weights[0] + weights[1])
        padded = [w for w in weights[2] if w is not None]
        assert len(padded) == 2 * world_size - 1
        assert all(w.tolist() == [0.0] for w in padded)
        last = order.permutation(101, seed=0, epoch=0)[-1:].tolist()
        assert [m.targets.tolist() for b in per_step[2] for m in b.microbatches] == [last] * (2 * world_size)


@pytest.mark.parametrize("kind", [in_tensors, Numbers])
@pytest.mark.parametrize("done", range(6))
def test_a_stream_that_starts_later_is_the_rest_of_the_whole_one(kind: type[Dataset[Any]], done: int) -> None:
    made = batches(kind(21), 1, 2)  # type: ignore[call-arg]
    whole = steps(made, 9)
    before = whole[done - 1] if done else None
    epoch = 0 if before is None else before.epoch + before.ends_epoch
    rest = steps(made, 9 - done, epoch, before.samples if before else 0)
    assert [numbers(b) for b in rest] == [numbers(b) for b in whole[done:]]


def test_drop_last_leaves_out_the_ragged_batch() -> None:
    made = batches(in_tensors(21), drop_last=True)
    assert made.steps_per_epoch == 2
    assert [(b.count, b.epoch, b.ends_epoch) for b in steps(made, 4)] == [
        (8, 0, False),
        (8, 0, True),
        (8, 1, False),
        (8, 1, True),
    ]
    with pytest.raises(ValueError, match=r"drop_last=true leaves no batch.*try train.global_batch_size=21"):
        batches(in_tensors(21), drop_last=True, global_batch_size=22)


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    assert sorted(numbers(steps(batches(in_tensors(5), global_batch_size=64), 1)[0])) == list(range(5))


def test_overfitting_repeats_the_first_batch() -> None:
    made = steps(batches(in_tensors(21), overfit_one_batch=True), 3)
    assert numbers(made[0]) == numbers(made[1]) == numbers(made[2])
    assert [b.epoch for b in made] == [0, 1, 2]


def test_the_gather_of_several_steps_gives_the_rows_of_each() -> None:
    wide = TensorData(
        torch.arange(40.0).unsqueeze(1).expand(40, 9000), torch.arange(40)
    )  # a few steps a chunk
    for batch in steps(batches(wide), 12):
        (part,) = batch.microbatches
        assert torch.equal(part.inputs[:, 0].long(), part.targets)


def test_floating_point_tensors_get_the_wanted_type_and_class_numbers_keep_theirs() -> None:
    for data in (in_tensors(9), Numbers(9)):
        (part,) = steps(batches(data, dtype=torch.float32), 1)[0].microbatches
        assert (part.inputs.dtype, part.targets.dtype) == (torch.float32, torch.int64)


# ---- random numbers of items


def drawn(world_size: int, num_workers: int, count: int = 4) -> dict[tuple[int, int], list[float]]:
    """What each (epoch, sample) has drawn, over all ranks."""
    found = {}
    for rank in range(world_size):
        made = batches(Drawing(21), rank, world_size, num_workers=num_workers)
        for batch in steps(made, count):
            for part in batch.microbatches:
                if part.weight_B is None:
                    for row, target in zip(part.inputs.tolist(), part.targets.tolist(), strict=True):
                        found[batch.epoch, target] = row
    return found


def test_items_draw_the_same_on_any_world_and_with_any_workers() -> None:
    alone = drawn(1, 0)
    assert drawn(1, 2) == alone
    assert drawn(3, 0) == alone
    assert drawn(2, 2) == alone


def test_items_draw_anew_each_epoch_and_each_sample_by_itself() -> None:
    alone = drawn(1, 0, 6)
    again = [(0, n) for n in range(21) if (1, n) in alone]
    assert again
    assert all(alone[0, n] != alone[1, n] for _, n in again)
    for kind in range(3):
        assert len({row[kind] for row in alone.values()}) == len(alone)


def test_loading_leaves_the_random_state_of_the_process_alone_with_workers() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(())
    torch.manual_seed(5)
    steps(batches(Drawing(21), num_workers=1), 2)
    assert torch.equal(torch.rand(()), wanted)


# ---- ways of fetching


def test_a_data_set_that_fetches_many_items_at_once_is_asked_so() -> None:
    assert len(numbers(steps(batches(Many(21)), 1)[0])) == 8


def test_fetching_many_at_once_with_random_numbers_is_refused_and_works_when_declared() -> None:
    class DrawingMany(Drawing):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[i] for i in indices]

    many = DrawingMany(21)
    with pytest.raises(
        ValueError, match=r"DrawingMany.__getitems__ draws random numbers.*random_items = True"
    ):
        steps(batches(many), 1)
    many.random_items = True  # type: ignore[attr-defined]
    (declared,), (direct,) = (steps(batches(d), 1)[0].microbatches for d in (many, Drawing(21)))
    assert torch.equal(declared.inputs, direct.inputs)


def test_a_subset_is_what_the_data_set_behind_it_says() -> None:
    drawing, direct = (Subset(Drawing(21), range(21)), Drawing(21))  # torch gives a Subset __getitems__
    (subset,), (items,) = (steps(batches(d), 1)[0].microbatches for d in (drawing, direct))
    assert torch.equal(subset.inputs, items.inputs)
    (part,) = steps(batches(Subset(Collating(21), range(21))), 1)[0].microbatches
    assert torch.equal(part.inputs.flatten().neg().long(), part.targets)


def test_a_data_set_may_bring_its_own_collate() -> None:
    (part,) = steps(batches(Collating(21)), 1)[0].microbatches
    assert torch.equal(part.inputs.flatten().neg().long(), part.targets)


def test_a_pair_of_tensors_is_taken_as_data_in_memory() -> None:
    pair = TensorDataset(torch.ones(3, 2), torch.zeros(3))
    assert type(in_memory(pair, CPU, torch.float64)) is TensorData


def test_a_class_derived_from_data_in_memory_is_asked_for_its_own_items() -> None:
    data = Doubled(torch.arange(21.0).unsqueeze(1), torch.arange(21))
    (part,) = steps(batches(data), 1)[0].microbatches
    assert torch.equal(part.inputs.flatten(), 2.0 * part.targets)
    (part, *_) = EvaluationBatches(
        data, microbatch_size=8, seed=0, rank=0, world_size=1, device=CPU, dtype=torch.float64
    )
    assert torch.equal(part.inputs.flatten(), 2.0 * part.targets)


def test_a_stream_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="train part, a Stream, has no length; want a map-style data set"):
        Splits(Stream())


def test_inputs_and_targets_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs but 2 targets"):
        TensorData(torch.ones(3, 1), torch.ones(2))


# ---- evaluation


@pytest.mark.parametrize("kind", [in_tensors, Numbers])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 101])
@pytest.mark.parametrize("world_size", WORLDS)
def test_an_evaluation_sees_each_sample_once(kind: type[Dataset[Any]], length: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        parts = list(
            EvaluationBatches(
                kind(length),  # type: ignore[call-arg]
                microbatch_size=8,
                seed=0,
                rank=rank,
                world_size=world_size,
                device=CPU,
                dtype=torch.float64,
            )
        )
        assert parts  # a rank without a share has the same metrics as the others
        assert all(len(p.targets) == 8 for p in parts[:-1])
        seen += [int(t) for p in parts if p.weight_B is None for t in p.targets]
    assert seen == list(range(length))


# ---- digits


def test_parts_of_digits_are_disjoint_and_cover_all() -> None:
    for split in ("random", "file_order"):
        parts = digits(split=split)  # type: ignore[arg-type]
        images = [d.inputs for d in (parts.train, parts.validation, parts.test)]  # type: ignore[union-attr]
        rows = torch.cat(images).flatten(1)
        assert len(rows) == 1797
        assert len(rows.unique(dim=0)) == len(whole_digits().unique(dim=0))
        assert torch.equal(rows.sum(0), whole_digits().sum(0))


def whole_digits() -> Tensor:
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().data).float() / 16


def test_a_random_split_has_the_same_share_of_every_class_and_follows_its_seed() -> None:
    first, same, other = (digits(split_seed=s).test.targets for s in (0, 0, 1))  # type: ignore[union-attr]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    for parts in (digits(), digits(split_seed=1)):
        shares = [
            torch.bincount(d.targets, minlength=10) / len(d)  # type: ignore[union-attr,arg-type]
            for d in (parts.train, parts.validation, parts.test)
        ]
        assert max((shares[0] - s).abs().max().item() for s in shares) < 0.004


def test_file_order_takes_the_first_writers_for_training() -> None:
    parts, rows = digits(split="file_order"), whole_digits().view(-1, 1, 8, 8)
    train, test = parts.train.inputs, parts.test.inputs  # type: ignore[union-attr,attr-defined]
    assert torch.equal(train, rows[: len(train)])
    assert torch.equal(test, rows[-len(test) :])


def test_a_part_of_fraction_zero_is_missing() -> None:
    parts = digits(validation_fraction=0, test_fraction=0.5)
    assert parts.validation is None
    assert len(parts.train) + len(parts.test) == 1797  # type: ignore[arg-type]


@pytest.mark.parametrize("fractions", [(0.6, 0.4), (-0.1, 0.1), (0.5, 1.0)])
def test_fractions_that_leave_no_training_part_are_refused(fractions: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"data.validation_fraction=.*try 0.15 each"):
        digits(*fractions)


def test_augmentation_shifts_and_adds_noise() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 1.0
    plain = TensorData(image[None], torch.zeros(1).long())
    torch.manual_seed(0)
    shifted = [Augmented(plain, max_shift=2, noise=0.0)[0][0] for _ in range(200)]
    places = {tuple(s.nonzero()[0].tolist()) for s in shifted}
    assert places == {(0, y, x) for y in range(1, 6) for x in range(2, 7)}
    noisy = Augmented(plain, max_shift=0, noise=0.1)
    noise = torch.stack([noisy[0][0] - image for _ in range(200)])
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)


def test_augmented_digits_are_drawn_anew_each_epoch_and_alike_on_any_world() -> None:
    data = Subset(digits(augment=True).train, range(6))
    data.random_items = True  # type: ignore[attr-defined]

    def images(world_size: int) -> dict[tuple[int, int], Tensor]:
        made = [batches(data, r, world_size, global_batch_size=6) for r in range(world_size)]
        parts = [(b.epoch, m) for each in made for b in steps(each, 2) for m in b.microbatches]
        return {
            (e, i): x
            for e, _ in parts
            for i, x in enumerate(torch.cat([m.inputs for f, m in parts if f == e]))
        }

    one, three = images(1), images(3)
    assert all(torch.equal(one[k], three[k]) for k in one)
    by_value = {e: {x.sum().item() for (f, _), x in one.items() if f == e} for e in (0, 1)}
    assert not by_value[0] & by_value[1]


# ---- made data


def test_the_articles_job_has_its_shapes_and_learnable_targets() -> None:
    parts = article()
    assert [tuple(d.inputs.shape) for d in (parts.train, parts.validation, parts.test)] == [  # type: ignore[union-attr,attr-defined]
        (1000, 10),
        (200, 10),
        (200, 10),
    ]
    inputs, targets = parts.train.inputs, parts.train.targets  # type: ignore[attr-defined]
    assert targets.shape == (1000, 2)
    assert (inputs.min() >= 0, inputs.max() < 1, targets.min() > 0, targets.max() < 1) == (True,) * 4
    assert targets.std(0).min() > 0.02
    assert torch.equal(article().train.inputs, inputs)  # type: ignore[attr-defined]
    assert not torch.equal(article(data_seed=1).train.inputs, inputs)  # type: ignore[attr-defined]


def test_the_teachers_targets_follow_its_weights_up_to_the_noise() -> None:
    data = teacher(samples=8000, features=5, outputs=2, noise=0.3, data_seed=4).train
    weight, bias = teacher_weights(5, 2, 4)
    rest = data.targets - (data.inputs @ weight.T + bias)  # type: ignore[attr-defined]
    assert rest.std().item() == pytest.approx(0.3, rel=0.03)
    assert rest.mean().abs().item() < 0.01
