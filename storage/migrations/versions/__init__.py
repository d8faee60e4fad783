"""Schema changes, oldest first; a released one is never edited.

Change a table with `op.batch_alter_table`, which rebuilds it where SQLite cannot alter it. SQLite
enforces no foreign keys meanwhile, so that the rows that refer to a rebuilt table stay: delete them
together with the rows that they refer to. Before the commit, all references are checked.
"""
