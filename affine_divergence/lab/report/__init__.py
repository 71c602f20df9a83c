# Reports: verdicts, tables, figures, one self-contained page.
from ._claims import CLAIM_HEADERS as CLAIM_HEADERS, claim_line as claim_line
from ._page import FEW as FEW, Report as Report, write_report as write_report
from ._tables import HEADERS as HEADERS, headline as headline, lines as lines, matrix as matrix
from ._tendencies import (
    TENDENCY_HEADERS as TENDENCY_HEADERS,
    Glance as Glance,
    glances as glances,
    markdown_table as markdown_table,
    tendency_line as tendency_line,
)
