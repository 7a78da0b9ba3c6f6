"""Growing arrays of fixed-size records, on disk or in memory.

`base` says what a store is, and `freezable` what it needs beside that for saved contexts and forks. `memory`, `direct`,
`mapped` and `uring/` are the engines, `engines` chooses and opens them; `file` is what those on a disk share. `layered`
puts a growing store over frozen ones. A `guard` tells whether a record is what was written; `encryption` hides it too.
"""
