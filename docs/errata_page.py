"""Generate docs/errata.md: python -m docs.errata_page"""

from __future__ import annotations

from pathlib import Path

from vitrail_course.errata.erratum import page

PAGE = Path(__file__).parent / "errata.md"

if __name__ == "__main__":
    PAGE.write_text(page())
