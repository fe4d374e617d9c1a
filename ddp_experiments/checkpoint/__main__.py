"""python -m ddp_experiments.checkpoint export RUN model.safetensors [--weights last]"""

import argparse
import sys
from pathlib import Path

from ddp_experiments.checkpoint.export import export
from ddp_experiments.errors import Exit, NoUsableCheckpoint, Refused


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_experiments.checkpoint", description="Weights out of a run."
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("export", help="write the weights as one .safetensors file")
    command.add_argument("run", type=Path, help="folder of a run, or of one of its checkpoints")
    command.add_argument("out", type=Path, help="file to write; must not exist")
    command.add_argument("--weights", choices=("best", "last"), default="best")
    options = parser.parse_args()
    try:
        export(options.run, options.out, options.weights)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return Exit.REFUSED
    except NoUsableCheckpoint as error:
        print(error, file=sys.stderr)
        return Exit.NO_CHECKPOINT
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
