"""Draw figures of the small model that comes with the package: python -m vitrail.views filters attention"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from vitrail.views.figures import FIGURES, make_figure
from vitrail.views.sample import sample_request

with TemporaryDirectory() as folder:
    request = sample_request(Path(folder))
    for name in sys.argv[1:] or FIGURES:
        print(f"{name}.png: {make_figure(FIGURES[name], request, Path()).caption}")
