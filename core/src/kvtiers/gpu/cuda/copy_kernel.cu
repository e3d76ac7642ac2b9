// Copies fragments between KV tensors and rows, or images of rows in a staging slot. One warp copies one unit (a
// fragment, or a slice of a long one) of one block, in the widest words that both addresses allow.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Unit {  // six 64-bit integers; see CudaGeometry.units
    u64 kv;      // address of the unit in block 0
    u64 stride;  // from one block to the next
    u64 tensor;  // bytes of one place's earlier tensors in the row
    u64 page;    // from one place to the next
    u64 within;  // from the page's start
    u64 nbytes;
};

struct Entry {
    u32 block;
    u32 row;  // or image
    u32 place;
};

struct Params {
    u64 base;        // address of row 0
    u64 row_stride;
    u64 units;       // address of Unit[num_units]
    u32 num_units;
    u32 num_entries;
    u32 places;      // of one tensor in a row, or in its image
    u32 first;       // the place that comes first there
    u32 into_rows;
    Entry entries[MAX_ENTRIES];
};

template <typename Word>
__device__ __forceinline__ u32 move_words(char* to, const char* from, u32 nbytes, u32 lane)
{
    constexpr u32 DEPTH = 8;  // loads in flight before the first store
    const u32 count = nbytes / sizeof(Word);
    Word* out = reinterpret_cast<Word*>(to);
    const Word* in = reinterpret_cast<const Word*>(from);
    u32 i = lane;
    for (; i + 32 * (DEPTH - 1) < count; i += 32 * DEPTH) {
        Word words[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) words[k] = __ldcs(in + i + 32 * k);
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) __stcs(out + i + 32 * k, words[k]);
    }
    for (; i < count; i += 32) __stcs(out + i, __ldcs(in + i));
    return count * sizeof(Word);
}

__device__ __forceinline__ void move_bytes(char* to, const char* from, u32 nbytes, u32 lane)
{
    const u64 both = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from);
    u32 done = 0;
    if (both % 16 == 0) done = move_words<uint4>(to, from, nbytes, lane);
    else if (both % 8 == 0) done = move_words<u64>(to, from, nbytes, lane);
    else if (both % 4 == 0) done = move_words<u32>(to, from, nbytes, lane);
    move_words<unsigned char>(to + done, from + done, nbytes - done, lane);
}

extern "C" __global__ void __launch_bounds__(512) kvtiers_copy(const __grid_constant__ Params params)
{
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 total = params.num_entries * params.num_units;
    const Unit* units = reinterpret_cast<const Unit*>(params.units);
    for (u32 w = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; w < total; w += warps) {
        const Entry entry = params.entries[w / params.num_units];
        const Unit unit = units[w % params.num_units];
        char* kv = reinterpret_cast<char*>(unit.kv + entry.block * unit.stride);
        char* at = reinterpret_cast<char*>(
            params.base + entry.row * params.row_stride + unit.tensor * params.places
            + (entry.place - params.first) * unit.page + unit.within);
        if (params.into_rows) move_bytes(at, kv, unit.nbytes, lane);
        else move_bytes(kv, at, unit.nbytes, lane);
    }
}
