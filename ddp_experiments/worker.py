"""A rank that `workers.start` has started: python -m ddp_experiments.worker FILE PARENT."""

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ddp_experiments import config, launch, process, rank
from ddp_experiments.errors import Refused
from ddp_experiments.identity import Origin


def main() -> None:
    """Run the config that the parent has composed and checked."""
    process.die_with_parent(int(sys.argv[2]))
    origin = Origin(**json.loads(Path(sys.argv[1]).read_text()))
    cfg = OmegaConf.merge(OmegaConf.structured(config.Config), origin.settings)
    assert isinstance(cfg, DictConfig)
    try:
        rank.be_rank(config.typed(cfg), origin)
    except Refused as refusal:
        launch.refuse(refusal.faults)


if __name__ == "__main__":
    main()
