"""Rows of the two matrices that host and device exchange in a decode step; a column is a row of the batch."""

# int64, from the host: where the input token comes from (the row of the step before that sampled it, or -1: the value
# below), position, KV slot, random key, row of the block tables; then new cells of these tables.
SOURCE, TOKEN, POSITION, SLOT, KEY_LOW, KEY_HIGH, TABLE_ROW, CELL_INDEX, CELL_BLOCK = range(9)
NUM_FIELDS = 9
# float64, to the host: the token and its log-prob under the distribution drawn from and under the temperature alone.
TOKEN_ID, LOGPROB, TEMPERATURE_LOGPROB = range(3)
NUM_RESULTS = 3
