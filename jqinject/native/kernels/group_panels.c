/* int8 times int8 or numbers in 4 bits, in groups along the depth: many rows, with AVX-512 VNNI.
 *
 * A lane is a column, and one vector four numbers of each of 16 columns. A tile is up to 6 rows times two vectors of
 * columns, whose sums stay in registers over a piece of the depth: a group, or PIECE numbers of one. Four numbers of a row
 * of lhs are broadcast and multiplied by both vectors. At the end of a piece the sums, exact integers, are multiplied by
 * the scales of their group and added up in float32.
 *
 * Before it, a panel of two stripes of columns becomes unsigned bytes in that order (see unsigned_lines) and stays in the
 * first-level cache while all rows of a block of lhs pass, which is laid out tile by tile (see layout.c) and stays in the
 * second-level cache. What makes rhs unsigned is put on again beforehand: the sums begin with `offsets`. Until the last
 * piece the results are kept in the thread's memory: rows of the output a power of 2 apart share few places of a cache.
 */
#include <string.h>

#include "layout.h"
#include "stripes.h"

#if defined(__x86_64__)

enum { PANEL = 2 * STRIPE, VECTORS = 4 * PANEL }; /* columns, and bytes of both vectors */
enum { GROUPS_AT_ONCE = PIECE / 4 + SPARE };      /* whose scales are read together */

/* Without and with zero points; and any, where lhs has a scale for each group too. */
typedef enum { WITHOUT_ZEROS, WITH_ZEROS, ANY } groups_kind;

/* Pieces of the depth that are done at once, all in one group or each a group of its own. */
typedef struct {
  int64_t piece, pieces, group, groups, start, numbers, vectors; /* the last in each piece */
} chunk;

/* Scales and zero points of the groups of a chunk, for both vectors of columns. */
typedef struct {
  group_numbers scale[2], zero[2];
} of_panel;

/* Rows of the next panel, which memory is asked for meanwhile: a line of each with every line of this one. */
typedef struct {
  const char* first;
  int64_t rows, stride;
} ahead;

/* The tile's numbers of rhs and lhs, and its rows of what lhs has for each piece. */
typedef struct {
  const uint8_t* rhs;
  const int32_t *lhs, *offsets;
  const float *sums, *scales, *of_rows;
  ahead next;
} tile_operands;

static chunk chunk_of(const product* p, int64_t piece) {
  const int64_t size = p->groups > 1 ? p->group : p->depth;
  chunk c = {.piece = piece, .pieces = 1, .group = piece / p->pieces_a_group, .groups = 1};
  c.start = c.group * size + piece % p->pieces_a_group * p->piece;
  c.numbers = numbers_of_piece(p, piece), c.vectors = vectors_of_piece(p, piece);
  if (p->pieces_a_group > 1) return c;
  c.groups = c.pieces = at_most(at_least(PIECE / size, 1), p->groups - c.group);
  c.numbers *= c.groups;
  return c;
}

INLINED void tile(const groups_kind kind, const int rows, const product* p, const chunk* c, tile_operands x,
                  const of_panel* n, const float* before, float* to, int64_t stride) {
  const int64_t of_line = p->four_bits ? 2 * LANES : LANES, bytes = at_most(c->vectors * LINE / of_line, LINE);
  fvec totals[MOST_BYTE_TILE_ROWS][2];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) totals[i][j] = V(setzero_ps)();
  for (int64_t piece = 0; piece < c->pieces; piece++, x.offsets += rows, x.sums += rows, x.scales += rows) {
    ivec sums[MOST_BYTE_TILE_ROWS][2];
    UNROLLED(int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = V(set1_epi32)(x.offsets[i]);
    for (int64_t left = c->vectors; left > 0; left -= of_line, x.next.first += bytes) {
      for (int64_t n = 0; n < x.next.rows; n++) _mm_prefetch(x.next.first + n * x.next.stride, _MM_HINT_T1);
      for (int64_t v = at_most(left, of_line); v > 0; v--, x.lhs += rows, x.rhs += VECTORS) {
        const ivec first = load_line(x.rhs), second = load_line(x.rhs + LINE);
        UNROLLED(int i = 0; i < rows; i++) {
          const ivec four = V(set1_epi32)(x.lhs[i]);
          ADD_PRODUCTS(sums[i][0], first, four);
          ADD_PRODUCTS(sums[i][1], second, four);
        }
      }
    }
    UNROLLED(int j = 0; j < 2; j++) {
      const fvec scale = V(loadu_ps)(n->scale[j].first + piece * n->scale[j].group);
      const float* zeros = n->zero[j].first + piece * n->zero[j].group;
      UNROLLED(int i = 0; i < rows; i++) {
        fvec part = V(cvtepi32_ps)(sums[i][j]);
        if (kind == WITH_ZEROS || (kind == ANY && n->zero[j].first != NULL))
          part = V(fnmadd_ps)(V(set1_ps)(x.sums[i]), V(loadu_ps)(zeros), part);
        if (kind == ANY) part = V(mul_ps)(part, V(set1_ps)(x.scales[i]));
        totals[i][j] = V(fmadd_ps)(part, scale, totals[i][j]);
      }
    }
  }
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) {
    const fvec of_row = V(set1_ps)(kind == ANY ? 1.0f : x.of_rows[i]);
    const fvec known = before == NULL ? V(setzero_ps)() : V(load_ps)(before + i * PANEL + j * LANES);
    V(storeu_ps)(to + i * stride + j * LANES, V(fmadd_ps)(totals[i][j], of_row, known));
  }
}

/* A tile of which only `rows` rows and `columns` columns exist: what is beyond is cut off. */
typedef void any_tile(const product* p, const chunk* c, tile_operands x, const of_panel* n, const float* before, float* to,
                      int64_t stride, int64_t rows, int64_t columns);

#define TILE(kind, height)                                                                                         \
  static TARGET __attribute__((noinline)) void kind##_##height(const product* p, const chunk* c, tile_operands x,  \
                                                               const of_panel* n, const float* before, float* to,    \
                                                               int64_t stride, int64_t rows, int64_t columns) {    \
    if (rows == height && columns == PANEL) {                                                                      \
      tile(kind, height, p, c, x, n, before, to, stride);                                                          \
      return;                                                                                                      \
    }                                                                                                              \
    float all[height * PANEL];                                                                                     \
    float of_rows[height] = {0};                                                                                   \
    for (int64_t i = 0; kind != ANY && i < rows; i++) of_rows[i] = x.of_rows[i];                                   \
    x.of_rows = of_rows;                                                                                           \
    tile(kind, height, p, c, x, n, before, all, PANEL);                                                            \
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * stride, all + i * PANEL, columns * sizeof(float));          \
  }

#define TILES(kind) TILE(kind, 2) TILE(kind, 4) TILE(kind, 6)
TILES(WITHOUT_ZEROS)
TILES(WITH_ZEROS)
TILES(ANY)
#define CHOICE(kind) {kind##_2, kind##_4, kind##_6}

/* Steps [step, end) of a stripe of columns as unsigned bytes. */
INLINED void unpack_stripe(const unsigned_kind kind, ivec key, const product* p, int64_t column, int64_t columns,
                           int64_t step, int64_t end, uint8_t* to) {
  const int64_t bytes = row_bytes(p);
  const uint8_t* rows[LANES];
  for (int j = 0; j < LANES; j++) rows[j] = (const uint8_t*)p->rhs + (column + at_most(j, columns - 1)) * p->rhs_stride;
  for (; step < end; step++) {
    fvec words[LANES];
    UNROLLED(int j = 0; j < LANES; j++) words[j] = as_floats(packed_line(rows[j], step * LINE, bytes));
    turn(words);
    UNROLLED(int n = 0; n < LANES; n++) {
      ivec lines[2];
      unsigned_lines(kind, key, as_integers(words[n]), lines);
      for (int half = 0; half < LINES(kind); half++, to += VECTORS) store_line(to, lines[half]);
    }
  }
}

static TARGET void unpack(const product* p, unsigned_form form, int64_t column, int64_t columns, const chunk* c,
                          uint8_t* to) {
  const int64_t size = p->four_bits ? 2 * LINE : LINE, step = c->start / size, end = step + parts(c->numbers, size);
  switch (form.kind) {
#define IF_KIND(of)                                                         \
  case of:                                                                  \
    unpack_stripe(of, form.key, p, column, columns, step, end, to);         \
    break;
    KINDS(IF_KIND)
  }
}

/* The panel at a column: its numbers, and its scales in float32 behind them. */
static TARGET of_panel read_panel(const product* p, unsigned_form form, int64_t column, int64_t columns, const chunk* c,
                                  uint8_t* to) {
  float* numbers = (float*)(to + PANEL * PIECE);
  of_panel found = {0};
  for (int j = 0; j < 2 && j * STRIPE < columns; j++) {
    const stripe s = {column + j * STRIPE, at_most(columns - j * STRIPE, STRIPE), c->group, c->groups};
    unpack(p, form, s.column, s.columns, c, to + j * LINE);
    found.scale[j] = read_stripe(p, p->scale, GROUP_BY_GROUP, s, numbers + 2 * j * STRIPE * GROUPS_AT_ONCE);
    found.zero[j] = read_stripe(p, p->zero, GROUP_BY_GROUP, s, numbers + (2 * j + 1) * STRIPE * GROUPS_AT_ONCE);
  }
  if (columns <= STRIPE) found.scale[1] = found.scale[0], found.zero[1] = found.zero[0]; /* cut off afterwards */
  return found;
}

/* The panel after the one at a column. */
static ahead panel_after(const product* p, const block* b, const chunk* c, int64_t column) {
  const int64_t next = column + PANEL < b->column_end ? column + PANEL : b->column;
  const int64_t start = next == b->column ? c->start + c->numbers : c->start;
  const char* first = (const char*)p->rhs + next * p->rhs_stride + start / (p->four_bits ? 2 : 1);
  return (ahead){first, at_most(b->column_end - next, PANEL), p->rhs_stride};
}

/* Takes some of its rows. */
static ahead take_rows(ahead* n, int64_t count) {
  const ahead taken = {n->first, at_most(count, n->rows), n->stride};
  n->first += taken.rows * n->stride, n->rows -= taken.rows;
  return taken;
}

TARGET void group_panels(const product* p, const block* b, uint8_t* scratch) {
  static any_tile* const choices[][3] = {CHOICE(WITHOUT_ZEROS), CHOICE(WITH_ZEROS), CHOICE(ANY)};
  const unsigned_form form = unsigned_form_of(p);
  const groups_kind kind = p->lane_scales != NULL ? ANY : p->zero.data != NULL ? WITH_ZEROS : WITHOUT_ZEROS;
  float* of_block = (float*)(scratch + OF_NUMBERS + OF_SCALES);
  const int64_t of_column = parts(b->row_end - b->row, MOST_TILE_ROWS) * MOST_TILE_ROWS;
  chunk c;
  for (int64_t piece = 0; piece < p->pieces; piece += c.pieces) {
    c = chunk_of(p, piece);
    for (int64_t j = b->column; j < b->column_end; j += PANEL) {
      const int64_t columns = at_most(b->column_end - j, PANEL);
      const of_panel n = read_panel(p, form, j, columns, &c, scratch);
      ahead next = panel_after(p, b, &c, j);
      const int last = piece + c.pieces == p->pieces;
      for (int64_t i = b->row, rows; i < b->row_end; i += rows) {
        const int64_t height = byte_tile_height(p->rows - i), of_pieces = i * p->pieces + piece * height;
        rows = at_most(height, b->row_end - i);
        const char* lhs = (const char*)p->laid_out + i * p->laid_out_stride + c.start * height;
        const tile_operands x = {scratch,
                                 (const int32_t*)lhs,
                                 p->lane_offsets + of_pieces,
                                 p->lane_sums + of_pieces,
                                 kind == ANY ? p->lane_scales + of_pieces : p->lane_sums,
                                 p->lhs_scale + i,
                                 take_rows(&next, parts(PANEL * height, b->row_end - b->row))};
        float *sums = of_block + (j - b->column) * of_column + (i - b->row) * PANEL, *y = p->y + i * p->columns + j;
        any_tile* chosen = choices[kind][height / 2 - 1];
        if (last) chosen(p, &c, x, &n, piece ? sums : NULL, y, p->columns, rows, columns);
        else chosen(p, &c, x, &n, piece ? sums : NULL, sums, PANEL, rows, PANEL);
      }
    }
  }
}

#endif
