// The quantisers of lowbit.quant for the CPU, in one pass over a tensor: read, round to BF16, rotate, find scales, round
// to the element format, write the operand and its codes. The arithmetic is that of the Python modules named below, in
// their order, so the bits are theirs; compile with -ffp-contract=off and without -ffast-math. FP32 quotients are the
// hardware's, which rounds correctly (bits.divide gets the same through FP64).
//
// A "unit" is the rows that share block scales: 1, 16 or 128. Threads take strips of whole units.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, MANTISSA = 0x007FFFFFu;
constexpr uint32_t INFINITE = 0x7F800000u, QUIET_NAN = 0x7FC00000u;
constexpr float LARGEST = 3.4028234663852886e38f;
constexpr int STRIP = 16;    // rows a thread reads together, so that a transposed read uses whole cache lines
constexpr int LANES = 16;    // elements in a block of two levels
constexpr int GROUP = 128;   // elements under one outer scale of a block, and under one correction of MS-EDEN

enum ScaleKind { BF16_ONLY, E8M0_UP, E8M0_FLOOR, E4M3_NEAREST, E4M3_UP, FP32, POWER_OF_TWO };
enum OuterKind { NONE, TENSOR, ROW, BLOCK, BLOCK_POW2 };
enum RoundingKind { NEAREST, STOCHASTIC, FOUR_OVER_SIX_MSE, FOUR_OVER_SIX_MAE, MS_EDEN, MS_EDEN_PUBLISHED };

}  // namespace

extern "C" {

struct Spec {  // a QuantSpec; see lowbit.quant.spec
    int32_t mantissa, bias, bits, integer, has_nan, nan_code;  // the element format
    int32_t block_rows, block_columns;                          // 0: all
    int32_t scale, outer, rounding;
    float max, bound, target;
    float limit;           // FP32(bound * target)
    float inverse_target;  // FP32(1 / target)
};

struct Call {
    const void* x;  // [rows, columns], strides in elements
    int64_t rows, columns, row_stride, column_stride;
    int32_t x_is_bf16, out_is_bf16;
    int64_t width;         // columns of the operand: rotated ones are a multiple of the rotation
    int64_t padded;        // columns that the quantiser sees
    int64_t stored;        // columns that are packed
    const float* signs;    // [rotation] or null
    int32_t rotation, threads;
    float rotation_scale;
    const int8_t* choice;  // [row blocks, column blocks] or null: four over six as it says
    const float* static_amax;
    uint32_t key[2], clock[3], lane;
    void* operand;   // [rows, width], FP32 or BF16
    float* after;    // [1] or [rows], or null
    uint8_t* data;   // packed codes [padded rows, stored * bits / 8], or null: then scales and outer are null too
    void* scales;    // bytes or FP32, [row blocks, stored column blocks]
    float* outer;    // FP32 [1 or rows, 1 or groups]
};

struct Unpack {
    const uint8_t* data;
    const void* scales;
    const float* outer;
    const float* element_table;  // [2**bits]
    const float* scale_table;    // [256]
    int64_t rows, width, stored, padded;
    int32_t out_is_bf16, threads;
    void* operand;
};
}

namespace {

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float from_bits(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline bool finite(float x) { return (bits_of(x) & MAGNITUDE) < INFINITE; }
inline float held(float x) { return x > LARGEST ? LARGEST : x; }
const float NOT_A_NUMBER = from_bits(QUIET_NAN);

inline float to_bf16(float x) {  // bits.round_to_bf16
    uint32_t b = bits_of(x), m = b & MAGNITUDE;
    uint32_t r = (std::min(m, INFINITE) + 0x7FFFu + ((m >> 16) & 1)) & 0xFFFF0000u;
    r = m > INFINITE ? QUIET_NAN : r;
    return from_bits(r | (b & SIGN));
}

inline float power_of_two(int e) { return from_bits(e > -127 ? uint32_t(e + 127) << 23 : 1u << 22); }
inline int exponent_floor(float amax, float largest) {
    return int(bits_of(amax) >> 23) - int(bits_of(largest) >> 23);
}
inline int exponent_up(float amax, float largest) {
    return exponent_floor(amax, largest) + int((bits_of(amax) & MANTISSA) > (bits_of(largest) & MANTISSA));
}

// ---- rounding.py: to an element format --------------------------------------------------------------------------

struct Format {
    uint32_t max_bits;
    int mantissa, min_field, code_bits;
    bool integer, has_nan;
    uint32_t nan_code;
};

Format format_of(const Spec& s) {
    return {bits_of(s.max), s.mantissa, 128 - s.bias, s.bits, s.integer != 0, s.has_nan != 0, uint32_t(s.nan_code)};
}

const Format E4M3 = {0x43E00000u /* 448 */, 3, 121, 8, false, true, 0x7F};

enum Mode { TO_NEAREST, UPWARDS, AT_RANDOM };

// n numbers to the format's grid and its codes. One flat loop without branches, which compilers turn into vectors.
template <Mode mode, bool integer>
void round_as(const float* __restrict x, int64_t n, const Format& f, const int32_t* __restrict noise,
              float* __restrict values, uint32_t* __restrict codes) {
    const uint32_t max_bits = f.max_bits, nan_value = f.has_nan ? QUIET_NAN : 0u, nan_code = f.has_nan ? f.nan_code : 0u;
    const int mantissa = f.mantissa, min_field = f.min_field, sign_shift = 32 - f.code_bits;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const uint32_t b = bits_of(x[i]), magnitude = b & MAGNITUDE, m = std::min(magnitude, max_bits);
        const int e = int(m >> 23), field = std::max(e, min_field);
        const int drop = 23 - mantissa + field - std::max(e, 1);
        const uint32_t significand = (m & MANTISSA) | (uint32_t(std::min(e, 1)) << 23);
        uint32_t steps;
        if (mode == AT_RANDOM) {
            const int d = std::min(drop - 17, 26);
            const uint32_t sixteenths = ((significand >> d) + 1) >> 1;
            steps = (sixteenths + uint32_t(noise[i])) >> 16;
        } else {
            const int d = std::min(drop, 26);
            const uint32_t one = 1u << d;
            const uint32_t added = mode == UPWARDS ? one - 1 : (one >> 1) - 1 + ((significand >> d) & 1);
            steps = (significand + added) >> d;
        }
        const float step = from_bits(uint32_t(field - mantissa) << 23);
        const uint32_t sign = b & SIGN;
        uint32_t v = bits_of(float(int32_t(steps)) * step), c = (uint32_t(field - min_field) << mantissa) + steps;
        v |= integer ? (steps ? sign : 0u) : sign;
        c = integer ? (sign ? 0u - c : c) & 0xFFu : c | sign >> sign_shift;
        const uint32_t nan = 0u - uint32_t(magnitude > INFINITE);  // a mask: a branch would end the vectors
        values[i] = from_bits((v & ~nan) | (nan_value & nan));
        codes[i] = (c & ~nan) | (nan_code & nan);
    }
}

template <Mode mode>
void round_many(const float* x, int64_t n, const Format& f, const int32_t* noise, float* values, uint32_t* codes) {
    if (f.integer) round_as<mode, true>(x, n, f, noise, values, codes);
    else round_as<mode, false>(x, n, f, noise, values, codes);
}

// ---- philox.py ----------------------------------------------------------------------------------------------------

struct Noise {
    uint32_t key[2], step, micro_batch, last;

    // Eight 16-bit numbers for each of `count` <= 16 counters from `first` on.
    void eights(uint64_t first, int count, int32_t* out) const {
        uint32_t c0[16], c1[16], c2[16], c3[16];
        for (int i = 0; i < 16; i++) {
            c0[i] = uint32_t(first + i); c1[i] = step; c2[i] = micro_batch; c3[i] = last;
        }
        uint32_t k0 = key[0], k1 = key[1];
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < 16; i++) {
                uint64_t a = uint64_t(0xD2511F53u) * c0[i], b = uint64_t(0xCD9E8D57u) * c2[i];
                uint32_t n0 = uint32_t(b >> 32) ^ c1[i] ^ k0, n2 = uint32_t(a >> 32) ^ c3[i] ^ k1;
                c1[i] = uint32_t(b); c3[i] = uint32_t(a); c0[i] = n0; c2[i] = n2;
            }
            k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
        }
        for (int i = 0; i < count; i++) {
            const uint32_t words[4] = {c0[i], c1[i], c2[i], c3[i]};
            for (int w = 0; w < 4; w++) {
                out[8 * i + 2 * w] = int32_t(words[w] & 0xFFFF);
                out[8 * i + 2 * w + 1] = int32_t(words[w] >> 16);
            }
        }
    }

    // Numbers start .. start + count of the sequence.
    void fill(uint64_t start, int64_t count, int32_t* out) const {
        int32_t block[128];
        while (count > 0) {
            int offset = int(start % 8);
            int counters = int(std::min<int64_t>(16, (count + offset + 7) / 8));
            int64_t taken = std::min<int64_t>(count, 8 * counters - offset);
            eights(start / 8, counters, block);
            std::memcpy(out, block + offset, size_t(taken) * 4);
            out += taken; start += uint64_t(taken); count -= taken;
        }
    }
};

// ---- hadamard.py ----------------------------------------------------------------------------------------------------

template <int N, int stride>
inline void butterflies(float* __restrict x) {
    for (int first = 0; first < N; first += 2 * stride) {
        float sum[stride], difference[stride];
        for (int i = 0; i < stride; i++) {
            sum[i] = x[first + i] + x[first + stride + i];
            difference[i] = x[first + i] - x[first + stride + i];
        }
        for (int i = 0; i < stride; i++) x[first + i] = sum[i];
        for (int i = 0; i < stride; i++) x[first + stride + i] = difference[i];
    }
    if constexpr (2 * stride < N) butterflies<N, 2 * stride>(x);
}

template <int N>
void rotate_group(float* x, const float* signs, float scale) {
    for (int i = 0; i < N; i++) x[i] *= signs[i];
    butterflies<N, 1>(x);
    for (int i = 0; i < N; i++) x[i] = to_bf16(x[i] * scale);
}

// ---- quantise.py ------------------------------------------------------------------------------------------------------

template <int N, typename T>
inline T tree_sum(const T* x) {  // by halving
    if constexpr (N == 1) {
        return x[0];
    } else {
        T half[N / 2];
        for (int i = 0; i < N / 2; i++) half[i] = x[i] + x[i + N / 2];
        return tree_sum<N / 2>(half);
    }
}

class Quantiser {
public:
    Quantiser(const Spec& spec, const Call& call)
        : s(spec), c(call), format(format_of(spec)),
          unit(spec.block_rows > 1 ? spec.block_rows : 1),
          row_length((call.padded + LANES - 1) / LANES * LANES),
          block(spec.block_columns ? spec.block_columns : row_length),
          blocks(spec.block_columns ? call.padded / spec.block_columns : 1),
          groups(grouped() ? call.padded / GROUP : 1),
          noise{{c.key[0], c.key[1]}, c.clock[0], c.clock[1], (c.clock[2] << 16) | c.lane} {}

    void run() {
        const int64_t strip = std::max(STRIP, unit), strips = (c.rows + strip - 1) / strip;
        const bool whole = s.scale != BF16_ONLY && (s.outer == TENSOR || (s.scale == FP32 && s.block_rows == 0));
        uint32_t amax = 0;
        if (whole) {
#pragma omp parallel num_threads(c.threads) reduction(max : amax)
            {
                std::vector<float> x(strip * row_length);
#pragma omp for schedule(static)
                for (int64_t i = 0; i < strips; i++) {
                    load(i * strip, strip, x.data());
                    for (float v : x) amax = std::max(amax, bits_of(v) & MAGNITUDE);
                }
            }
            tensor_amax = from_bits(amax);
        }
#pragma omp parallel num_threads(c.threads)
        {
            Work w(*this, strip);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < strips; i++) {
                load(i * strip, strip, w.x.data());
                for (int64_t row = 0; row < strip && i * strip + row < c.rows; row += unit)
                    quantise_unit(w, w.x.data() + row * row_length, i * strip + row);
            }
        }
    }

private:
    const Spec& s;
    const Call& c;
    const Format format;
    const int unit;
    const int64_t row_length, block, blocks, groups;
    const Noise noise;
    float tensor_amax = 0;

    bool grouped() const { return s.outer == BLOCK || s.outer == BLOCK_POW2; }
    bool has_choice() const { return s.rounding == FOUR_OVER_SIX_MSE || s.rounding == FOUR_OVER_SIX_MAE; }

    struct Work {
        std::vector<float> x, y, values, values4, amax, ratio, scale, multiplier, scale4, multiplier4, outer, inverse;
        std::vector<uint32_t> codes, codes4, scale_codes;
        std::vector<int32_t> noise;

        Work(const Quantiser& q, int64_t strip)
            : x(strip * q.row_length), y(q.row_length), values(q.unit * q.row_length),
              values4(q.has_choice() ? values.size() : 0), amax(q.blocks), ratio(q.blocks), scale(q.blocks),
              multiplier(q.blocks), scale4(q.blocks), multiplier4(q.blocks), outer(q.blocks), inverse(q.blocks),
              codes(values.size()), codes4(values4.size()), scale_codes(q.blocks), noise(q.row_length) {}
    };

    // Rows first .. first + count, rounded to BF16 and rotated; zeros around them.
    void load(int64_t first, int64_t count, float* x) const {
        std::memset(x, 0, size_t(count * row_length) * 4);
        const int64_t last = std::min(count, c.rows - first);
        if (c.x_is_bf16) load_as(static_cast<const uint16_t*>(c.x), first, last, x);
        else load_as(static_cast<const float*>(c.x), first, last, x);
        if (!c.signs) return;
        for (int64_t r = 0; r < last; r++)
            for (int64_t g = 0; g < c.width; g += c.rotation) {
                float* group = x + r * row_length + g;
                if (c.rotation == 128) rotate_group<128>(group, c.signs, c.rotation_scale);
                else rotate_group<16>(group, c.signs, c.rotation_scale);
            }
    }

    static float read(float v) { return to_bf16(v); }
    static float read(uint16_t v) { return from_bits(uint32_t(v) << 16); }

    template <typename T>
    void load_as(const T* source, int64_t first, int64_t count, float* x) const {
        const T* from = source + first * c.row_stride;
        if (c.column_stride == 1) {
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = 0; k < c.columns; k++) x[r * row_length + k] = read(from[r * c.row_stride + k]);
            return;
        }
        for (int64_t k0 = 0; k0 < c.columns; k0 += LANES)
            for (int64_t r0 = 0; r0 < count; r0 += LANES) {
                float tile[LANES][LANES];
                const int64_t kn = std::min<int64_t>(LANES, c.columns - k0), rn = std::min<int64_t>(LANES, count - r0);
                for (int64_t k = 0; k < kn; k++)
                    for (int64_t r = 0; r < rn; r++)
                        tile[k][r] = read(from[(r0 + r) * c.row_stride + (k0 + k) * c.column_stride]);
                for (int64_t r = 0; r < rn; r++)
                    for (int64_t k = 0; k < kn; k++) x[(r0 + r) * row_length + k0 + k] = tile[k][r];
            }
    }

    void quantise_unit(Work& w, const float* x, int64_t row) const {
        if (s.scale == BF16_ONLY) {
            write_operand(x, row);
            return;
        }
        find_amax(w, x);
        if (s.outer == NONE) one_level(w);
        else two_level_scales(w);
        for (int64_t r = 0; r < unit; r++) round_row(w, x + r * row_length, r, row + r);
        if (has_choice()) four_over_six(w, x, row);
        else if (s.rounding == MS_EDEN || s.rounding == MS_EDEN_PUBLISHED) correct(w, x, row);
        write(w, row);
    }

    void find_amax(Work& w, const float* x) const {
        for (int64_t b = 0; b < blocks; b++) {
            uint32_t most = 0;
            for (int64_t r = 0; r < unit; r++) {
                const float* y = x + r * row_length + b * block;
                for (int64_t i = 0; i < block; i++) most = std::max(most, bits_of(y[i]) & MAGNITUDE);
            }
            w.amax[b] = from_bits(most);
        }
        if (s.outer == NONE && s.block_rows == 0) w.amax[0] = tensor_amax;
        if (c.static_amax)
            for (float& a : w.amax) a = finite(a) ? *c.static_amax : a;
    }

    void one_level(Work& w) const {  // scales.one_level
        for (int64_t b = 0; b < blocks; b++) {
            const float amax = w.amax[b];
            float scale, multiplier;
            if (s.scale == FP32) {
                multiplier = amax == 0 ? 1.0f : held(s.max / amax);
                multiplier = finite(amax) ? multiplier : NOT_A_NUMBER;
                scale = 1.0f / multiplier;
            } else {
                int e = s.scale == E8M0_FLOOR ? exponent_floor(amax, s.max) : exponent_up(amax, s.max);
                e = std::min(std::max(e, -127), 127);
                if (s.scale == POWER_OF_TWO) e = amax == 0 ? 0 : std::max(e, -126);
                scale = finite(amax) ? power_of_two(e) : NOT_A_NUMBER;
                multiplier = finite(amax) ? power_of_two(-e) : NOT_A_NUMBER;
            }
            w.scale[b] = scale;
            w.multiplier[b] = multiplier;
        }
    }

    void outer_scale(float amax, float& outer, float& inverse) const {  // scales.outer_scale
        if (!finite(amax)) {
            outer = inverse = NOT_A_NUMBER;
        } else if (s.outer == BLOCK_POW2) {
            const int e = std::min(std::max(exponent_up(amax, s.limit), -126), 126);
            outer = power_of_two(e);
            inverse = power_of_two(-e);
        } else if (s.outer == BLOCK) {
            outer = amax / s.bound / s.target;
            outer = outer == 0 ? 1.0f : outer;
            inverse = 1.0f / outer;
        } else {
            inverse = amax == 0 ? 1.0f : held(s.limit / amax);
            outer = 1.0f / inverse;
        }
    }

    void two_level_scales(Work& w) const {
        const int64_t a_group = blocks / groups;
        for (int64_t g = 0; g < groups; g++) {
            uint32_t most = 0;
            for (int64_t b = g * a_group; b < (g + 1) * a_group; b++) most = std::max(most, bits_of(w.amax[b]));
            float outer, inverse;
            outer_scale(s.outer == TENSOR ? tensor_amax : from_bits(most), outer, inverse);
            for (int64_t b = g * a_group; b < (g + 1) * a_group; b++) w.outer[b] = outer, w.inverse[b] = inverse;
        }
        inner_scale(w, s.target, s.inverse_target, w.scale.data(), w.multiplier.data());
        if (has_choice()) inner_scale(w, 4.0f, 0.25f, w.scale4.data(), w.multiplier4.data());
    }

    void inner_scale(Work& w, float target, float inverse_target, float* scale, float* multiplier) const {
        const float *amax = w.amax.data(), *outer = w.outer.data(), *inverse = w.inverse.data();
        float* ratio = w.ratio.data();
        const bool exact = s.outer == BLOCK_POW2;
        if (!grouped())
            for (int64_t b = 0; b < blocks; b++) ratio[b] = amax[b] * (inverse[b] * inverse_target);
        else if (exact)
            for (int64_t b = 0; b < blocks; b++) ratio[b] = amax[b] * inverse[b] / target;
        else
            for (int64_t b = 0; b < blocks; b++) ratio[b] = amax[b] / outer[b] / target;
        if (s.scale == E4M3_UP) round_many<UPWARDS>(ratio, blocks, E4M3, nullptr, scale, w.scale_codes.data());
        else round_many<TO_NEAREST>(ratio, blocks, E4M3, nullptr, scale, w.scale_codes.data());
        for (int64_t b = 0; b < blocks; b++) {
            if (grouped()) scale[b] = scale[b] == 0 ? 0x1p-9f : scale[b];
            else if (s.rounding >= MS_EDEN) scale[b] = scale[b] == 0 ? 1.0f : scale[b];
            multiplier[b] = held(1.0f / (exact ? scale[b] : outer[b] * scale[b]));
        }
    }

    // y = x times the multiplier of its block, in `w.y`.
    void scale_row(Work& w, const float* x, const float* multiplier) const {
        for (int64_t b = 0; b < blocks; b++) {
            const float m = multiplier[b], first = w.inverse[b];
            const float* from = x + b * block;
            float* y = w.y.data() + b * block;
            if (s.outer == BLOCK_POW2) for (int64_t i = 0; i < block; i++) y[i] = (from[i] * first) * m;
            else for (int64_t i = 0; i < block; i++) y[i] = from[i] * m;
        }
    }

    void round_row(Work& w, const float* x, int64_t r, int64_t row) const {
        const int64_t at = r * row_length, n = blocks * block;
        scale_row(w, x, w.multiplier.data());
        if (s.rounding == STOCHASTIC) {
            noise.fill(uint64_t(row) * uint64_t(c.padded), c.padded, w.noise.data());
            round_many<AT_RANDOM>(w.y.data(), n, format, w.noise.data(), &w.values[at], &w.codes[at]);
        } else {
            round_many<TO_NEAREST>(w.y.data(), n, format, nullptr, &w.values[at], &w.codes[at]);
        }
        if (has_choice()) {
            scale_row(w, x, w.multiplier4.data());
            round_many<TO_NEAREST>(w.y.data(), n, format, nullptr, &w.values4[at], &w.codes4[at]);
        }
    }

    // The error of one block's row, summed by halving over its 16 columns.
    template <bool squared, typename T>
    static T error(const float* __restrict values, float scale, const float* __restrict x, T inverse) {
        T terms[LANES];
        for (int i = 0; i < LANES; i++) {
            const T d = T(values[i] * scale) - T(x[i]) * inverse;
            terms[i] = squared ? d * d : std::abs(d);
        }
        return tree_sum<LANES>(terms);
    }

    template <bool squared, typename T>
    bool four_is_better(const Work& w, const float* x, int64_t b) const {
        const T inverse = T(w.inverse[b]);
        const float scale6 = w.scale[b], scale4 = w.scale4[b];
        const float *six = &w.values[b * LANES], *four = &w.values4[b * LANES], *y = x + b * LANES;
        if (unit == 1) return error<squared>(four, scale4, y, inverse) < error<squared>(six, scale6, y, inverse);
        T error6[LANES], error4[LANES];  // of the block's 16 rows
        for (int64_t r = 0; r < LANES; r++) {
            error6[r] = error<squared>(six + r * row_length, scale6, y + r * row_length, inverse);
            error4[r] = error<squared>(four + r * row_length, scale4, y + r * row_length, inverse);
        }
        return tree_sum<LANES>(error4) < tree_sum<LANES>(error6);
    }

    bool four_is_better(const Work& w, const float* x, int64_t b) const {
        const bool fp32 = s.outer == BLOCK_POW2;
        if (s.rounding == FOUR_OVER_SIX_MSE)
            return fp32 ? four_is_better<true, float>(w, x, b) : four_is_better<true, double>(w, x, b);
        return fp32 ? four_is_better<false, float>(w, x, b) : four_is_better<false, double>(w, x, b);
    }

    void four_over_six(Work& w, const float* x, int64_t row) const {
        for (int64_t b = 0; b < blocks; b++) {
            const int8_t before = c.choice ? c.choice[row / unit * blocks + b] : int8_t(0);
            if (before == 6 || (before == 0 && !four_is_better(w, x, b))) continue;
            w.scale[b] = w.scale4[b];
            for (int64_t r = 0; r < unit; r++) {
                const int64_t at = r * row_length + b * LANES;
                std::memcpy(&w.values[at], &w.values4[at], LANES * sizeof(float));
                std::memcpy(&w.codes[at], &w.codes4[at], LANES * sizeof(uint32_t));
            }
        }
    }

    template <typename T>
    float correction(const float* x, const Work& w, int64_t g) const {  // eden.correction
        T top[GROUP], bottom[GROUP];
        for (int j = 0; j < GROUP / LANES; j++) {
            const int64_t b = g * (GROUP / LANES) + j;
            for (int i = 0; i < LANES; i++) {
                const float value = w.values[b * LANES + i], source = x[b * LANES + i];
                T u, v;
                if (s.rounding == MS_EDEN) {
                    u = T(source) * T(w.inverse[b]);
                    v = T(value * w.scale[b]);
                } else {
                    const float first = s.outer == BLOCK_POW2 ? w.inverse[b] : 1.0f;
                    u = T((source * first) * w.multiplier[b]);
                    v = T(value);
                }
                top[j * LANES + i] = u * u;
                bottom[j * LANES + i] = u * v;
            }
        }
        const T t = tree_sum<GROUP>(top), d = tree_sum<GROUP>(bottom);
        return d == 0 ? 1.0f : float(double(t) / double(d));
    }

    void correct(Work& w, const float* x, int64_t row) const {
        Noise of_scales = noise;
        of_scales.last |= 1;  // Purpose.SCALES
        of_scales.fill(uint64_t(row) * uint64_t(blocks), blocks, w.noise.data());
        const bool in_fp32 = s.rounding == MS_EDEN && s.outer == BLOCK_POW2;
        for (int64_t g = 0; g < c.padded / GROUP; g++) {
            const float factor = in_fp32 ? correction<float>(x, w, g) : correction<double>(x, w, g);
            for (int64_t b = g * (GROUP / LANES); b < (g + 1) * (GROUP / LANES); b++) w.ratio[b] = w.scale[b] * factor;
        }
        round_many<AT_RANDOM>(w.ratio.data(), blocks, E4M3, w.noise.data(), w.scale.data(), w.scale_codes.data());
    }

    void write(Work& w, int64_t row) const {
        const int64_t rows = std::min<int64_t>(unit, c.rows - row);
        if (c.after) {
            if (s.scale == FP32) {
                if (s.block_rows == 1) c.after[row] = w.scale[0];
                else if (row == 0) c.after[0] = w.scale[0];
            } else {
                if (s.outer == ROW) c.after[row] = w.outer[0];
                else if (row == 0) c.after[0] = w.outer[0];
            }
        }
        if (c.data) pack(w, row);
        if (!c.operand) return;
        for (int64_t r = 0; r < rows; r++) {
            float* v = w.values.data() + r * row_length;
            for (int64_t b = 0; b < blocks && s.scale != FP32; b++) {  // Values.operand
                float* y = v + b * block;
                const float scale = w.scale[b], outer = w.outer[b];
                if (s.outer == BLOCK_POW2) for (int64_t i = 0; i < block; i++) y[i] = (y[i] * scale) * outer;
                else if (s.outer == BLOCK) for (int64_t i = 0; i < block; i++) y[i] = y[i] * (outer * scale);
                else for (int64_t i = 0; i < block; i++) y[i] = y[i] * scale;
            }
            write_operand(v, row + r);
        }
    }

    void write_operand(const float* v, int64_t row) const {
        if (c.out_is_bf16) {
            uint16_t* out = static_cast<uint16_t*>(c.operand) + row * c.width;
            for (int64_t i = 0; i < c.width; i++) out[i] = uint16_t(bits_of(to_bf16(v[i])) >> 16);
        } else {
            float* out = static_cast<float*>(c.operand) + row * c.width;
            for (int64_t i = 0; i < c.width; i++) out[i] = to_bf16(v[i]);
        }
    }

    void pack(Work& w, int64_t row) const {  // packing.pack_codes, scales.encode_scale
        const int64_t bytes = c.stored * s.bits / 8;
        for (int64_t r = 0; r < unit; r++) {
            const uint32_t* codes = w.codes.data() + r * row_length;
            uint8_t* out = c.data + (row + r) * bytes;
            if (s.bits == 4) {
                for (int64_t i = 0; i < bytes; i++) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
            } else if (s.bits == 6) {
                for (int64_t i = 0, j = 0; i < bytes; i += 3, j += 4) {
                    const uint32_t word = codes[j] | codes[j + 1] << 6 | codes[j + 2] << 12 | codes[j + 3] << 18;
                    out[i] = uint8_t(word); out[i + 1] = uint8_t(word >> 8); out[i + 2] = uint8_t(word >> 16);
                }
            } else {
                for (int64_t i = 0; i < bytes; i++) out[i] = uint8_t(codes[i]);
            }
        }
        const int64_t kept = s.block_columns ? c.stored / s.block_columns : 1;
        const bool tensor = s.block_rows == 0;
        const int64_t at = tensor ? 0 : row / unit * kept;
        if (s.outer != NONE)
            round_many<TO_NEAREST>(w.scale.data(), blocks, E4M3, nullptr, w.ratio.data(), w.scale_codes.data());
        for (int64_t b = 0; b < kept && !(tensor && row > 0); b++) {
            const uint32_t magnitude = bits_of(w.scale[b]) & MAGNITUDE;
            if (s.scale == FP32 || s.scale == POWER_OF_TWO)
                static_cast<float*>(c.scales)[at + b] = w.scale[b];
            else if (s.outer != NONE)
                static_cast<uint8_t*>(c.scales)[at + b] = uint8_t(w.scale_codes[b]);
            else
                static_cast<uint8_t*>(c.scales)[at + b] = magnitude < INFINITE ? uint8_t(magnitude >> 23) : uint8_t(255);
        }
        if (s.outer == NONE) return;
        if (s.outer == TENSOR) {
            if (row == 0) c.outer[0] = w.outer[0];
        } else {
            for (int64_t g = 0; g < groups; g++) c.outer[row * groups + g] = w.outer[g * (blocks / groups)];
        }
    }
};

}  // namespace

extern "C" void lowbit_factor(const Spec* spec, const Call* call) { Quantiser(*spec, *call).run(); }

// Codes and scales -> the operand: Quantised.operand.
extern "C" void lowbit_unpack(const Spec* spec, const Unpack* call) {
    const Spec& s = *spec;
    const Unpack& u = *call;
    const int64_t unit = s.block_rows ? s.block_rows : std::max<int64_t>(u.rows, 1);
    const int64_t block = s.block_columns ? s.block_columns : u.stored;
    const int64_t blocks = u.stored / block, bytes = u.stored * s.bits / 8;
    const bool bytes_of_scale = s.scale != FP32 && s.scale != POWER_OF_TWO;
    const bool grouped = s.outer == BLOCK || s.outer == BLOCK_POW2;
    const int64_t groups = grouped ? u.padded / GROUP : 1;
#pragma omp parallel num_threads(u.threads)
    {
        std::vector<float> row_values(u.stored);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < u.rows; row++) {
            const uint8_t* data = u.data + row * bytes;
            float* v = row_values.data();
            if (s.bits == 4) {
                for (int64_t i = 0; i < bytes; i++) {
                    v[2 * i] = u.element_table[data[i] & 15];
                    v[2 * i + 1] = u.element_table[data[i] >> 4];
                }
            } else if (s.bits == 6) {
                for (int64_t i = 0, j = 0; i < bytes; i += 3, j += 4) {
                    const uint32_t word = data[i] | data[i + 1] << 8 | data[i + 2] << 16;
                    for (int k = 0; k < 4; k++) v[j + k] = u.element_table[word >> (6 * k) & 63];
                }
            } else {
                for (int64_t i = 0; i < bytes; i++) v[i] = u.element_table[data[i]];
            }
            for (int64_t b = 0; b < blocks && s.scale != FP32; b++) {
                const int64_t at = row / unit * blocks + b;
                const float scale = bytes_of_scale ? u.scale_table[static_cast<const uint8_t*>(u.scales)[at]]
                                                   : static_cast<const float*>(u.scales)[at];
                float* y = v + b * block;
                if (grouped) {
                    const float outer = u.outer[row * groups + b * block / GROUP];
                    if (s.outer == BLOCK_POW2) for (int64_t i = 0; i < block; i++) y[i] = (y[i] * scale) * outer;
                    else for (int64_t i = 0; i < block; i++) y[i] = y[i] * (outer * scale);
                } else {
                    for (int64_t i = 0; i < block; i++) y[i] = y[i] * scale;
                }
            }
            if (u.out_is_bf16) {
                uint16_t* out = static_cast<uint16_t*>(u.operand) + row * u.width;
                for (int64_t i = 0; i < u.width; i++) out[i] = uint16_t(bits_of(to_bf16(v[i])) >> 16);
            } else {
                float* out = static_cast<float*>(u.operand) + row * u.width;
                for (int64_t i = 0; i < u.width; i++) out[i] = to_bf16(v[i]);
            }
        }
    }
}

// Stream.signs: bits of the first words, lowest first.
extern "C" void lowbit_signs(const uint32_t* key, const uint32_t* clock, uint32_t lane, int64_t count, float* out) {
    const Noise noise{{key[0], key[1]}, clock[0], clock[1], (clock[2] << 16) | lane};
    std::vector<int32_t> halves((count + 15) / 16);
    noise.fill(0, int64_t(halves.size()), halves.data());
    for (int64_t i = 0; i < count; i++) out[i] = halves[i / 16] >> (i % 16) & 1 ? -1.0f : 1.0f;
}
