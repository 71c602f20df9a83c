# Reports: tables, figures, one self-contained page.
from ._page import write_report as write_report
from ._tables import HEADERS as HEADERS, headline as headline, lines as lines
