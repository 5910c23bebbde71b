"""One rank of a benchmark: `python -m echelon.bench OPTIONS`, started by `echelon bench`."""

import sys

from echelon.bench.options import Options
from echelon.bench.rank import main

if __name__ == "__main__":
    sys.exit(main(Options.from_text(sys.argv[1])))
