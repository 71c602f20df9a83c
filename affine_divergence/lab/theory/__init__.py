# Signal, gradient and Gram cosine through depth for several starts: mean-field theory beside random networks.
from ._figure import starts_figure as starts_figure
from ._starts import STARTS as STARTS, Followed as Followed, follow as follow, table as table
