/* int8 times int8 or numbers in 4 bits, summed in int32: many rows, with the dot product instruction of AVX-512 VNNI.
 *
 * The instruction multiplies unsigned bytes by signed ones, so lhs is taken as lhs + 128 (its top bit flipped), and
 * 128 * (sum over t of rhs[j][t]) is taken off again: exact, since sums in int32 wrap around the same way.
 *
 * One line is 64 bytes along the depth, what one instruction takes. A tile is TILE_ROWS x TILE_COLUMNS results, whose
 * sums of 16 lanes stay in registers over DEPTH. Before it, TILE_COLUMNS rows of rhs (they stay in the first-level
 * cache) and a block of lhs (second level) are copied line by line into the order in which the tile reads them, zero
 * where they end early. Numbers in 4 bits become bytes there, beside an lhs that is laid out for it (see layout.c).
 */
#include "vectors.h"

#if defined(__x86_64__)

/* Rows of rhs from the tile at work to the one that is fetched meanwhile: from memory into the second-level cache, half
 * while a tile is packed and half while its first rows are computed, so that memory never rests. */
enum { AHEAD = TILE_COLUMNS };

/* One tile of `rows` rows. `excess` is what flipping the top bits of lhs added; `kept` are the columns that exist.
 * Fetches TILE_COLUMNS / 2 rows of `ahead` meanwhile. */
INLINED void tile(const int rows, const uint8_t* lhs, const int8_t* rhs, int64_t lines, __m256i excess, int32_t* out,
                  int64_t stride, __mmask8 kept, int add, const char* ahead, int64_t ahead_stride) {
  __m512i sums[TILE_ROWS][TILE_COLUMNS], left[TILE_ROWS];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < TILE_COLUMNS; j++) sums[i][j] = _mm512_setzero_si512();
  do {
    UNROLLED(int i = 0; i < rows; i++) left[i] = _mm512_load_si512(lhs + i * LINE);
    UNROLLED(int j = 0; j < TILE_COLUMNS; j++) {
      __m512i right = _mm512_load_si512(rhs + j * LINE);
      UNROLLED(int i = 0; i < rows; i++) ADD_PRODUCTS(sums[i][j], left[i], right);
    }
    UNROLLED(int j = 0; j < TILE_COLUMNS / 2; j++) _mm_prefetch(ahead + j * ahead_stride, _MM_HINT_T1);
    ahead += LINE;
    lhs += TILE_ROWS * LINE;
    rhs += TILE_COLUMNS * LINE;
  } while (--lines);
  /* Without this GCC spills inside the loop for the sake of what follows. */
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < TILE_COLUMNS; j++) ;
  UNROLLED(int i = 0; i < rows; i++) {
    __m256i y = _mm256_sub_epi32(lane_sums(sums[i]), excess);
    if (add) y = _mm256_add_epi32(y, _mm256_maskz_loadu_epi32(kept, out + i * stride));
    _mm256_mask_storeu_epi32(out + i * stride, kept, y);
  }
}

#define TILE(rows)                                                                                                    \
  static TARGET __attribute__((noinline)) void tile_##rows(const uint8_t* lhs, const int8_t* rhs, int64_t lines,        \
                                                         __m256i excess, int32_t* out, int64_t stride, __mmask8 kept, \
                                                         int add, const char* ahead, int64_t ahead_stride) {          \
    tile(rows, lhs, rhs, lines, excess, out, stride, kept, add, ahead, ahead_stride);                                 \
  }
TILE(1)
TILE(2)
TILE(3)

/* `rows` rows of lhs, flipped, in the order of tiles. */
static TARGET void pack_lhs(const int8_t* from, int64_t rows, int64_t stride, int64_t depth, uint8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int64_t lines = parts(depth, LINE);
  for (int64_t i = 0; i < rows; i++) {
    uint8_t* line = to + ((i / TILE_ROWS) * lines * TILE_ROWS + i % TILE_ROWS) * LINE;
    for (int64_t t = 0; t < lines; t++)
      _mm512_store_si512(line + t * TILE_ROWS * LINE,
                         _mm512_xor_si512(line_of(from + i * stride + t * LINE, depth - t * LINE), flip));
  }
}

/* The bytes of row `j` of rhs from `start` on, in the order of tiles; 128 times their sum in 16 lanes. */
INLINED __m512i pack_bytes(const product* p, int64_t j, int64_t start, int64_t depth, int fetch, int8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int8_t* row = p->rhs + j * p->rhs_stride + start;
  __m512i sum = _mm512_setzero_si512();
  for (int64_t t = 0; t < depth; t += LINE, to += TILE_COLUMNS * LINE) {
    const __m512i line = line_of(row + t, depth - t);
    if (fetch) _mm_prefetch((const char*)row + (AHEAD * p->rhs_stride + t), _MM_HINT_T1);
    ADD_PRODUCTS(sum, flip, line);
    _mm512_store_si512(to, line);
  }
  return sum;
}

/* The same of numbers in 4 bits: two lines of a packed one. */
INLINED __m512i pack_four_bits(const product* p, int64_t j, int64_t start, int64_t depth, int fetch, int8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80), table = table_of(p->table);
  const uint8_t* row = (const uint8_t*)p->rhs + j * p->rhs_stride;
  __m512i sum = _mm512_setzero_si512(), even, odd;
  for (int64_t t = start; t < start + depth; t += 2 * LINE, to += 2 * TILE_COLUMNS * LINE) {
    split_halves(packed_line(row, t / 2, (p->depth + 1) / 2), _mm512_setzero_si512(), &even, &odd);
    even = _mm512_shuffle_epi8(table, even), odd = _mm512_shuffle_epi8(table, odd);
    if (fetch) _mm_prefetch((const char*)row + (AHEAD * p->rhs_stride + t / 2), _MM_HINT_T1);
    ADD_PRODUCTS(sum, flip, even);
    ADD_PRODUCTS(sum, flip, odd);
    _mm512_store_si512(to, even);
    _mm512_store_si512(to + TILE_COLUMNS * LINE, odd);
  }
  return sum;
}

/* At most TILE_COLUMNS rows of rhs (the last one again where there are fewer) in the order of tiles, and 128 times their
 * sums. */
static TARGET __m256i pack_rhs(const product* p, int64_t column, int64_t columns, int64_t start, int64_t depth,
                             int8_t* to) {
  __m512i sums[TILE_COLUMNS];
  for (int j = 0; j < TILE_COLUMNS; j++)
    sums[j] = (p->four_bits ? pack_four_bits : pack_bytes)(p, column + at_most(j, columns - 1), start, depth,
                                                           j < TILE_COLUMNS / 2, to + j * LINE);
  return lane_sums(sums);
}

TARGET void int8_tiles(const product* p, const block* b, uint8_t* scratch) {
  int8_t* packed_rhs = (int8_t*)scratch + BLOCK_ROWS * DEPTH;
  const int8_t* lhs = p->four_bits ? p->laid_out : p->lhs;
  const int64_t whole = p->four_bits ? p->steps * 2 * LINE : p->depth, a_byte = p->four_bits ? 2 : 1;
  for (int64_t start = 0; start < whole; start += DEPTH) {
    const int64_t depth = at_most(whole - start, DEPTH), lines = parts(depth, LINE);
    pack_lhs(lhs + b->row * whole + start, b->row_end - b->row, whole, depth, scratch);
    for (int64_t j = b->column; j < b->column_end; j += TILE_COLUMNS) {
      const int64_t columns = at_most(b->column_end - j, TILE_COLUMNS);
      const __m256i excess = pack_rhs(p, j, columns, start, depth, packed_rhs);
      const __mmask8 kept = (__mmask8)(0xff >> (TILE_COLUMNS - columns));
      const char* ahead = (const char*)p->rhs + (j + AHEAD + TILE_COLUMNS / 2) * p->rhs_stride + start / a_byte;
      for (int64_t i = b->row; i < b->row_end; i += TILE_ROWS, ahead = (const char*)packed_rhs) {
        const uint8_t* packed_lhs = scratch + (i - b->row) * lines * LINE;
        int32_t* out = p->out + i * p->columns + j;
        const int64_t step = i == b->row ? p->rhs_stride : 0, left = b->row_end - i;
        (left == 1   ? tile_1
         : left == 2 ? tile_2
                     : tile_3)(packed_lhs, packed_rhs, lines, excess, out, p->columns, kept, start > 0, ahead, step);
      }
    }
  }
}

#endif
