-- wrk's script: posts the review in the file REVIEW and counts answers that are not the right one, which is the text in
-- the file ANSWER, byte for byte.
local function content(name)
  local file = assert(io.open(os.getenv(name), "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = content("REVIEW")
local right = content("ANSWER")
answers, wrong = 0, 0

function response(status, headers, body)
  answers = answers + 1
  if status ~= 200 or body ~= right then
    wrong = wrong + 1
    if wrong == 1 then io.stderr:write("first wrong answer: ", status, " ", body, "\n") end
  end
end

local threads = {}
function setup(thread) table.insert(threads, thread) end

function done(summary)
  local all, bad = 0, 0
  for _, thread in ipairs(threads) do
    all, bad = all + thread:get("answers"), bad + thread:get("wrong")
  end
  local errors = summary.errors
  local form = '{"answers": %d, "wrong": %d, "connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n'
  io.stderr:write(form:format(all, bad, errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
