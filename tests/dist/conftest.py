"""The helpers beside these tests are modules of their own, because the processes that tests start import them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
