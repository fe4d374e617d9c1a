"""Train a model: one device, one machine or many, from one config.

python train.py                                        the default experiment
python train.py mode=multigpu                          all accelerators of this machine
python train.py -m optimizer.lr=1e-3,1e-2              a sweep
torchrun --nproc_per_node=2 train.py mode=multigpu     the same, started by torchrun
python train.py --continue outputs/NAME/RUN            go on where a run stopped
python train.py --help                                 groups, settings, more commands
"""

import hydra
from omegaconf import DictConfig

from ddp_experiments import cli, config, identity


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    from ddp_experiments import launch  # torch is imported from here on

    return launch.run(config.typed(cfg), identity.saved_form(cfg))


if __name__ == "__main__":
    cli.entry(main)
