-- The server's clock, and the fields of a record.

-- include record.lua

-- Server time in milliseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The ticket's permits and its capacity.
local function size(record)
  return tonumber(string.sub(record, 63, 72)), tonumber(string.sub(record, 74, 83))
end

local function with_expiry(record, ends)
  return string.sub(record, 1, 16) .. string.format('%013d', ends) .. string.sub(record, 30)
end

local function id_of(record)
  return string.sub(record, 30, 61)
end
