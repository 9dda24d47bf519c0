/* int8 times int8, summed in int32: many rows, with the dot product instruction of AVX-512 VNNI.
 *
 * The instruction multiplies unsigned bytes by signed ones, so lhs is taken as lhs + 128 (its top bit flipped), and
 * 128 * (sum over t of rhs[j][t]) is taken off again: exact, since sums in int32 wrap around the same way.
 *
 * One line is 64 bytes along the depth, what one instruction takes. A tile is TILE_ROWS x TILE_COLUMNS results, whose
 * sums of 16 lanes stay in registers over DEPTH. Before it, TILE_COLUMNS rows of rhs (they stay in the first-level
 * cache) and a block of lhs (second level) are copied line by line into the order in which the tile reads them, zero
 * where they end early.
 */
#include "avx512.h"

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
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < TILE_COLUMNS; j++) __asm__ volatile("" : "+v"(sums[i][j]));
  UNROLLED(int i = 0; i < rows; i++) {
    __m256i y = _mm256_sub_epi32(lane_sums(sums[i]), excess);
    if (add) y = _mm256_add_epi32(y, _mm256_maskz_loadu_epi32(kept, out + i * stride));
    _mm256_mask_storeu_epi32(out + i * stride, kept, y);
  }
}

#define TILE(rows)                                                                                                    \
  static VNNI __attribute__((noinline)) void tile_##rows(const uint8_t* lhs, const int8_t* rhs, int64_t lines,        \
                                                         __m256i excess, int32_t* out, int64_t stride, __mmask8 kept, \
                                                         int add, const char* ahead, int64_t ahead_stride) {          \
    tile(rows, lhs, rhs, lines, excess, out, stride, kept, add, ahead, ahead_stride);                                 \
  }
TILE(1)
TILE(2)
TILE(3)

/* `rows` rows of lhs, flipped, in the order of tiles. */
static VNNI void pack_lhs(const int8_t* from, int64_t rows, int64_t stride, int64_t depth, uint8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int64_t lines = parts(depth, LINE);
  for (int64_t i = 0; i < rows; i++) {
    uint8_t* line = to + ((i / TILE_ROWS) * lines * TILE_ROWS + i % TILE_ROWS) * LINE;
    for (int64_t t = 0; t < lines; t++)
      _mm512_store_si512(line + t * TILE_ROWS * LINE,
                         _mm512_xor_si512(line_of(from + i * stride + t * LINE, depth - t * LINE), flip));
  }
}

/* At most TILE_COLUMNS rows of rhs (the last one again where there are fewer) in the order of tiles, and 128 times their
 * sums. */
static VNNI __m256i pack_rhs(const int8_t* from, int64_t columns, int64_t stride, int64_t depth, int8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int64_t lines = parts(depth, LINE);
  __m512i sums[TILE_COLUMNS];
  for (int j = 0; j < TILE_COLUMNS; j++) {
    const int8_t* row = from + (j < columns ? j : columns - 1) * stride;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t t = 0; t < lines; t++) {
      const __m512i line = line_of(row + t * LINE, depth - t * LINE);
      if (j < TILE_COLUMNS / 2) _mm_prefetch((const char*)row + (AHEAD * stride + t * LINE), _MM_HINT_T1);
      ADD_PRODUCTS(sum, flip, line);
      _mm512_store_si512(to + (t * TILE_COLUMNS + j) * LINE, line);
    }
    sums[j] = sum;
  }
  return lane_sums(sums);
}

VNNI void int8_tiles(const product* p, const block* b, uint8_t* scratch) {
  int8_t* packed_rhs = (int8_t*)scratch + BLOCK_ROWS * DEPTH;
  for (int64_t start = 0; start < p->depth; start += DEPTH) {
    const int64_t depth = at_most(p->depth - start, DEPTH), lines = parts(depth, LINE);
    pack_lhs(p->lhs + b->row * p->depth + start, b->row_end - b->row, p->depth, depth, scratch);
    for (int64_t j = b->column; j < b->column_end; j += TILE_COLUMNS) {
      const int64_t columns = at_most(b->column_end - j, TILE_COLUMNS);
      const __m256i excess = pack_rhs(p->rhs + j * p->depth + start, columns, p->depth, depth, packed_rhs);
      const __mmask8 kept = (__mmask8)(0xff >> (TILE_COLUMNS - columns));
      const char* ahead = (const char*)p->rhs + (j + AHEAD + TILE_COLUMNS / 2) * p->depth + start;
      for (int64_t i = b->row; i < b->row_end; i += TILE_ROWS, ahead = (const char*)packed_rhs) {
        const uint8_t* packed_lhs = scratch + (i - b->row) * lines * LINE;
        int32_t* out = p->out + i * p->columns + j;
        const int64_t step = i == b->row ? p->depth : 0, left = b->row_end - i;
        (left == 1   ? tile_1
         : left == 2 ? tile_2
                     : tile_3)(packed_lhs, packed_rhs, lines, excess, out, p->columns, kept, start > 0, ahead, step);
      }
    }
  }
}
