-- The server's clock, and the fields of a record.

-- include record.lua

-- Server time in milliseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The ticket's permits and its capacity.
local function size(record)
  return tonumber(string.sub(record, PERMITS, PERMITS_END)), tonumber(string.sub(record, CAPACITY, CAPACITY_END))
end

local function with_expiry(record, ends)
  return string.sub(record, NUMBER, NUMBER_END) .. string.format('%013d', ends) .. string.sub(record, ID)
end

local function id_of(record)
  return string.sub(record, ID, ID_END)
end
