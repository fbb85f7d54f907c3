"""A page of results: one HTML file that opens from disk, made of tables, figures and pictures."""

from nullbayes.page.document import Block as Block
from nullbayes.page.document import Column as Column
from nullbayes.page.document import Curves as Curves
from nullbayes.page.document import Gallery as Gallery
from nullbayes.page.document import Histograms as Histograms
from nullbayes.page.document import Page as Page
from nullbayes.page.document import Picture as Picture
from nullbayes.page.document import Reliability as Reliability
from nullbayes.page.document import Section as Section
from nullbayes.page.document import Series as Series
from nullbayes.page.document import Table as Table
from nullbayes.page.document import Value as Value
from nullbayes.page.evaluation import evaluation_sections as evaluation_sections
from nullbayes.page.evaluation import evaluation_summary as evaluation_summary
from nullbayes.page.inputs import gallery as gallery
