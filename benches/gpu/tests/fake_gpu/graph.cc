// CUDA graphs: the work enqueued during a capture runs at each launch of the graph.
//
// The rules are those of the driver's documentation (cuStreamBeginCapture, "Graph memory nodes"); undefined cases
// are errors. A capture has one stream. Memory allocated in it has the same address as long as the graph exists, is
// filled with NaN by each launch, and must be freed in the same capture (otherwise a second launch would fail; here
// the first does). Other memory that it uses must still exist at each launch. Synchronizing the stream, a copy to
// pageable memory, a wait for an event from outside, and loading a module end a capture with an error, as in CUDA; a
// copy from pageable memory, which each launch would read again, aborts the process with a message.

enum { CAPTURE_INVALIDATED = 901, CAPTURE_WRONG_THREAD = 908 };
enum { KERNEL_NODE = 0, ALLOC_NODE = 10, FREE_NODE = 11 };

// A graph and its memory.
struct OwnGraph : Graph {
  struct Memory {
    uintptr_t from, to;
    bool freed;
  };
  std::vector<Memory> memory;
  std::map<size_t, int> types;  // of nodes that are no kernels
  std::map<uintptr_t, uint64_t> outside;  // other memory that it uses, and its allocation number
  std::thread::id owner = std::this_thread::get_id();
  ~OwnGraph();

  Memory *find(uintptr_t at) {
    for (Memory &m : memory)
      if (m.from <= at && at < m.to) return &m;
    return nullptr;
  }
};
using SharedGraph = std::shared_ptr<OwnGraph>;

// Protected by `ordering`: allocation numbers of live memory by address; memory of graphs, also of destroyed ones.
static std::map<uintptr_t, uint64_t> &born = *new std::map<uintptr_t, uint64_t>;
static std::set<uintptr_t> &graph_memory = *new std::set<uintptr_t>;
// Unfreed memory of destroyed graphs, so that a stale address cannot free other memory.
static std::vector<uintptr_t> &kept = *new std::vector<uintptr_t>;
// The stream that this thread captures.
static thread_local Stream *capturing;

OwnGraph::~OwnGraph() {
  Lock order(ordering);
  for (Memory &m : memory) {
    watched.erase(m.from);
    if (m.freed) free((void *)m.from);
    else kept.push_back(m.from);
  }
}

static OwnGraph *graph_of(Stream *s) { return static_cast<OwnGraph *>(s->graph); }

// An operation that is illegal in a capture: returns an error and invalidates the capture.
static int not_in_capture(Stream *s) {
  s->graph->invalid = true;
  return CAPTURE_UNSUPPORTED;
}
static int unfit_for_capture(Stream *s) {
  if (s->graph && graph_of(s)->owner != std::this_thread::get_id())
    violation("a stream used that another thread captures");
  return s->graph && s->graph->invalid ? int(CAPTURE_INVALIDATED) : 0;
}
static void put(Stream *s, int type, std::function<void()> task) {
  graph_of(s)->types[s->graph->nodes.size()] = type;
  s->graph->nodes.push_back({std::move(task), {}});
}
static void allocated(Stream *s, uintptr_t at, size_t bytes) {
  static uint64_t count;
  {
    Lock order(ordering);
    born[at] = ++count;
    graph_memory.erase(at);
    if (!s->graph) return;
    graph_memory.insert(at);
  }
  graph_of(s)->memory.push_back({at, at + bytes, false});
  put(s, ALLOC_NODE, [=] { memset((void *)at, 0xff, bytes); });
}
static bool of_a_graph(uintptr_t at) {
  Lock order(ordering);
  return graph_memory.count(at) > 0;
}
// A capture may free only its own memory; outside of captures no memory of graphs may be freed.
static int release_in_graph(Stream *s, uintptr_t at) {
  if (!s->graph) return 1;
  if (int error = unfit_for_capture(s)) return error;
  OwnGraph::Memory *own = graph_of(s)->find(at);
  // Returned by the call alone: on an H100 (driver 580.159) the capture goes on.
  if (!own || own->from != at || own->freed) return 1;
  own->freed = true;
  {
    Lock order(ordering);
    watched.erase(at);
  }
  put(s, FREE_NODE, [at, bytes = own->to - at] { memset((void *)at, 0x5a, bytes); });
  return 0;
}
// The allocation that contains an address, and its number. Protected by `ordering`.
static std::pair<uintptr_t, uint64_t> allocation(uintptr_t at) {
  auto next = watched.upper_bound(at);
  if (next == watched.begin() || std::prev(next)->second <= at) return {0, 0};
  uintptr_t from = std::prev(next)->first;
  return {from, born[from]};
}

extern "C" {
// Number of operations that this thread launched: kernels, matrix products, graphs.
uint64_t *fake_gpu_launched() {
  static thread_local uint64_t launched[2];
  return launched;
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
  if (uintptr_t(stream) < 2) return CAPTURE_UNSUPPORTED;
  Stream *s = stream_of(stream);
  if (s->graph || capturing || mode < 0 || mode > 2) return 1;
  if (due("cuStreamBeginCapture", here()).kind == RETURN) return 999;
  s->graph = new OwnGraph;
  capturing = s;
  Lock lock(captures_m);
  if (mode == GLOBAL) global_captures[s->graph] = std::this_thread::get_id();
  return 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
  Stream *s = stream_of(stream);
  *graph = nullptr;
  if (!s->graph) return 1;
  if (graph_of(s)->owner != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  SharedGraph made(graph_of(s));
  s->graph = nullptr;
  capturing = nullptr;
  { Lock lock(captures_m); global_captures.erase(made.get()); }
  {
    Lock order(ordering);
    // Addresses of the graph's memory become invalid.
    for (auto &m : made->memory) watched.erase(m.from);
    for (Node &node : made->nodes)
      for (Access &a : node.accesses)
        if (!made->find(a.from)) made->outside.insert(allocation(a.from));
  }
  if (made->invalid) return CAPTURE_INVALIDATED;
  *graph = new SharedGraph(made);
  return 0;
}
int cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
  SharedGraph &g = *static_cast<SharedGraph *>(graph);
  size_t room = nodes ? *count : 0;
  *count = g->nodes.size();
  for (size_t i = 0; i < std::min(room, *count); i++) {
    auto type = g->types.find(i);
    nodes[i] = (void *)uintptr_t(type == g->types.end() ? int(KERNEL_NODE) : type->second);
  }
  return 0;
}
// A node is represented by its type.
int cuGraphNodeGetType(void *node, int *type) { *type = int(uintptr_t(node)); return 0; }
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
  if (flags) violation("a graph instantiated with flags, which the fake has not");
  *exec = new SharedGraph(*static_cast<SharedGraph *>(graph));
  return 0;
}
int cuGraphUpload(void *, void *) { return 0; }
int cuGraphLaunch(void *exec, void *stream) {
  SharedGraph graph = *static_cast<SharedGraph *>(exec);
  Stream *s = stream_of(stream);
  if (s->graph) violation("a graph launched in a capture, which the fake has not");
  for (auto &m : graph->memory)
    if (!m.freed) violation("a graph is launched that does not free what it allocates");
  std::vector<Access> accesses;
  {
    Lock order(ordering);
    for (auto &[from, which] : graph->outside)
      if (allocation(from) != std::make_pair(from, which))
        violation("a graph is launched that uses memory which is there no more");
    std::set<std::tuple<uintptr_t, uintptr_t, bool>> seen;
    for (Node &node : graph->nodes)
      for (Access &a : node.accesses)
        if (!graph->find(a.from) && seen.insert({a.from, a.to, a.write}).second) accesses.push_back(a);
  }
  fake_gpu_launched()[1]++;
  s->push([graph]() mutable {
    for (Node &node : graph->nodes) node.task();
    graph.reset();  // not when the stream forgets this, under its lock
  }, accesses);
  return 0;
}
int cuGraphExecDestroy(void *exec) { delete static_cast<SharedGraph *>(exec); return 0; }
int cuGraphDestroy(void *graph) { delete static_cast<SharedGraph *>(graph); return 0; }
}
