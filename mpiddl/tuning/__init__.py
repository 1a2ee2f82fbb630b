"""Which algorithm for which size: measured once on a cluster and kept in a table, or by a rule.

`rule` is what is known without measuring, `table` what `mpiddl tune` has measured, `choice` asks both; `fit` is the cost model
that predictions come from; `verbs` opens connections over verbs with the threshold of the table.
"""

from mpiddl.tuning.choice import Choice, Chooser, Forced, check_algorithms, chooser
from mpiddl.tuning.table import Entry, Place, Table, add_to_table, check_table, read_table, write_table

__all__ = ["Choice", "Chooser", "Entry", "Forced", "Place", "Table", "add_to_table", "check_algorithms", "check_table",
           "chooser", "read_table",
           "write_table"]  # fmt: skip
